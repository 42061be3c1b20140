"""Send, `ll` or `simple`: one rank pushes a message through its channels to another.

    rank 2 [x] ──▶ slots of rank 0 ──▶ y of rank 0's recv

Bytes     n pushed, under LL twice that, and 16 a piece of header; 8 a piece come back as acknowledgement.
Hops      1; the fifth piece of a channel and those behind it wait for an acknowledgement each, a second one.
Waits     see `channels`. A message whose pieces find free slots is away when the kernel ends, whether or not the
          receiver has asked for it: four short ones of a tag are. Any other ends with its receiver.
Reuse     see `channels`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.device.channels import (
    CHANNELS,
    SLOTS,
    begin,
    clear_stale,
    end,
    later,
    line,
    piece_words,
    show,
    slot_of,
    wait_free,
)
from tricomm.kernels.device.packing import load_words, store_tile
from tricomm.kernels.primitives import RANK, peer, put_ll

SENT = tl.constexpr(layout.SENT)
PLAIN = tl.constexpr(layout.PLAIN)


@triton.jit(do_not_specialize=["numel", "call", "rank", "tag"])
def send(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, rank: tl.int64, tag: tl.int64,
         LL: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
         ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    me = tl.load(group + RANK)
    rank, tag = rank.to(tl.int64), tag.to(tl.int64)  # the interpreter takes a small number for 32 bits
    words = tl.cdiv(numel, PACK)
    piece = piece_words(group, words, LL, BLOCK)
    pieces = tl.maximum(tl.cdiv(words, piece), 1)
    channels = tl.load(group + CHANNELS)
    begin(group, call, rank)
    first_part = tl.program_id(0).to(tl.int64)
    status = 0
    while (first_part < tl.minimum(channels, pieces)) & (status == 0):
        channel = (first_part + tag) % channels
        mine, theirs = line(group, group, rank, channel), line(group, peer(group, rank), me, channel)
        number, plain = tl.load(mine + SENT), tl.load(mine + PLAIN)
        part = first_part
        while (part < pieces) & (status == 0):
            status = wait_free(group, mine, number, LANES, PTX)
            if status == 0:
                base = part * piece
                count = tl.maximum(tl.minimum(words - base, piece), 0)
                slot = slot_of(group, peer(group, rank), me, channel, number)
                bit = tl.full([], 1, tl.int64) << (number % SLOTS)
                if LL:
                    cleared = clear_stale(group, slot, number, plain, BLOCK, PTX)
                    for first in range(0, count, BLOCK):
                        data = load_words(x_ptr, base + first, numel, BLOCK, ALIGNED)
                        put_ll(slot + 2 * first, data, number, count - first, BLOCK, PTX)
                    show(theirs, number, call, tag, cleared, LANES, PTX)
                    plain &= ~bit
                else:
                    for first in range(0, count, BLOCK):
                        data = load_words(x_ptr, base + first, numel, BLOCK, ALIGNED)
                        store_tile(slot, first, data, count, BLOCK)
                    show(theirs, number, call, tag, True, LANES, PTX)
                    plain |= bit
                number = later(number, 1)
                part += channels
        if status == 0:
            tl.store(mine + SENT, number)
            tl.store(mine + PLAIN, plain)
        first_part += tl.num_programs(0)
    end(group, call, status)
