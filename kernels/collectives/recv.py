"""Recv, `ll` or `simple`: one rank takes a message out of its channels from another, or from whoever has sent one.

    rank 2's send [x] ──▶ slots of rank 0 ──▶ y of rank 0

Bytes     8 a piece written to the sender as acknowledgement; the payload is read from own memory.
Hops      1, the sender's.
Waits     see `channels`.
Any       with rank -1 one block looks at the headers of all peers in turn, from the lowest rank on, until one has a
          message of this tag, and takes that. It says whose in the control page.
Reuse     see `channels`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.device.channels import (
    CHANNELS,
    begin,
    end,
    find,
    give_back,
    later,
    line,
    look_around,
    piece_words,
    slot_of,
    waiting,
)
from tricomm.kernels.device.packing import load_tile, store_words
from tricomm.kernels.primitives import CONTROL, RANK, get_ll, peer

NEXT = tl.constexpr(layout.NEXT)
TAKEN = tl.constexpr(layout.TAKEN)
TOLD = tl.constexpr(layout.TOLD)
TOLD_WORDS = tl.constexpr(layout.TOLD_WORDS)


@triton.jit
def any_source(group, tag, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """(a rank with a message of this tag, status)."""
    me = tl.load(group + RANK)
    found = tl.full([], -1, tl.int64)
    status = 0
    spins = 0
    while (found < 0) & (status == 0):
        source = tl.zeros([], tl.int64)
        channel = tag % tl.load(group + CHANNELS)
        while (source < WORLD_SIZE) & (found < 0):
            if source != me:
                mine = line(group, group, source, channel)
                here = waiting(group, mine, tl.load(mine + NEXT), tl.load(mine + TAKEN), tag, LANES, PTX)
                found = tl.where(here == 1, source, found)
            source += 1
        if found < 0:
            status = look_around(group, spins, LANES, PTX)
        spins += 1
    return found, status


@triton.jit(do_not_specialize=["numel", "call", "rank", "tag", "blocks"])
def recv(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, rank: tl.int64, tag: tl.int64, blocks: tl.int64,
         LL: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
         ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 64 // y_ptr.dtype.element_ty.primitive_bitwidth
    me = tl.load(group + RANK)
    rank, tag, blocks = (
        rank.to(tl.int64),
        tag.to(tl.int64),
        blocks.to(tl.int64),
    )  # the interpreter takes a small number for 32 bits
    words = tl.cdiv(numel, PACK)
    piece = piece_words(group, words, LL, BLOCK)
    pieces = tl.maximum(tl.cdiv(words, piece), 1)
    channels = tl.load(group + CHANNELS)
    begin(group, call, rank)
    used = tl.minimum(channels, pieces)
    source = rank
    status = 0
    if rank < 0:
        source, status = any_source(group, tag, WORLD_SIZE, LANES, PTX)
        if status == 0:
            control = tl.load(group + CONTROL).to(tl.pointer_type(tl.int64))
            tl.store(control + TOLD + ((call >> 32) % TOLD_WORDS), source)
    block = tl.program_id(0).to(tl.int64)  # of the sender's `blocks`
    first_part = block
    while (block < blocks) & (status == 0):
        if first_part < used:
            channel = (first_part + tag) % channels
            mine, theirs = line(group, group, source, channel), line(group, peer(group, source), me, channel)
            following, taken = tl.load(mine + NEXT), tl.load(mine + TAKEN)
            part = first_part
            while (part < pieces) & (status == 0):
                ahead, status = find(group, mine, source, following, taken, call, tag, LANES, PTX)
                base = part * piece
                count = tl.maximum(tl.minimum(words - base, piece), 0)
                number = later(following, ahead)
                slot = slot_of(group, group, source, channel, number)
                first = tl.zeros([], tl.int64)
                while (first < count) & (status == 0):
                    if LL:
                        tile = tl.multiple_of(slot + 2 * first, 16)
                        data, status = get_ll(group, tile, 0, number, count - first, 1, BLOCK, PTX)
                        if status == 0:
                            store_words(y_ptr, base + first, data[0], numel, BLOCK, ALIGNED)
                    else:
                        store_words(y_ptr, base + first, load_tile(slot, first, count, BLOCK), numel, BLOCK, ALIGNED)
                    first += BLOCK
                if status == 0:
                    give_back(theirs, number, LANES, PTX)
                    taken |= tl.full([], 1, tl.int64) << ahead
                    while (taken & 1) == 1:
                        taken >>= 1
                        following = later(following, 1)
                    part += channels
            if status == 0:
                tl.store(mine + NEXT, following)
                tl.store(mine + TAKEN, taken)
            first_part += blocks
        else:
            block += tl.num_programs(0)
            first_part = block
    end(group, call, status)
