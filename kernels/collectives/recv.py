"""Recv, `ll` or `simple`: one rank receives a message out of its queues from another rank, or from any.

    rank 2's send [x] ──▶ slots of rank 0 ──▶ y of rank 0

Bytes     8 per piece written to the sender as acknowledgement; the payload is read from own memory.
Hops      1, the sender's.
Waits     see `device/message_queues.py`.
Any       with rank -1 one block looks at the headers of all peers in turn, from the lowest rank on, until one has a
          message of this tag, and receives that. It writes the source to the control page.
Reuse     see `device/message_queues.py`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.device.chunks import packed_words
from tricomm.kernels.device.dependent_launch import wait_for_launches
from tricomm.kernels.device.message_queues import (
    QUEUES,
    acknowledge,
    begin_message,
    end_message,
    match_header,
    next_number,
    piece_words,
    poll_abort,
    probe,
    queue_state,
    slot_of,
)
from tricomm.kernels.device.packing import load_tile, store_words
from tricomm.kernels.group import control_of, peer, rank_of, table_of
from tricomm.kernels.primitives import get_ll

NEXT = tl.constexpr(layout.NEXT)
RECEIVED_AHEAD = tl.constexpr(layout.RECEIVED_AHEAD)
RECV_SOURCE = tl.constexpr(layout.RECV_SOURCE)
RECV_SOURCE_WORDS = tl.constexpr(layout.RECV_SOURCE_WORDS)


@triton.jit
def any_source(group, tag, SPEC: tl.constexpr):
    """(a rank with a message of this tag, status)."""
    me = rank_of(group)
    sender = tl.full([], -1, tl.int64)
    status = 0
    spins = 0
    while (sender < 0) & (status == 0):
        source = tl.zeros([], tl.int64)
        queue = tag % tl.load(table_of(group) + QUEUES)
        while (source < SPEC.WORLD_SIZE) & (sender < 0):
            if source != me:
                mine = queue_state(group, table_of(group), source, queue)
                here = probe(mine, tl.load(mine + NEXT), tl.load(mine + RECEIVED_AHEAD), tag, SPEC)
                sender = tl.where(here == 1, source, sender)
            source += 1
        if sender < 0:
            status = poll_abort(group, spins, SPEC)
        spins += 1
    return sender, status


@triton.jit(do_not_specialize=["numel", "call", "rank", "tag", "blocks"])
def recv(
    x_ptr,
    y_ptr,
    group,
    numel: tl.int64,
    call: tl.int64,
    rank: tl.int64,
    tag: tl.int64,
    blocks: tl.int64,
    SPEC: tl.constexpr,
):
    wait_for_launches(SPEC)
    me = rank_of(group)
    # The interpreter makes a small number an int32.
    rank, tag, blocks = rank.to(tl.int64), tag.to(tl.int64), blocks.to(tl.int64)
    words = packed_words(y_ptr, numel)
    piece = piece_words(group, words, SPEC)
    pieces = tl.maximum(tl.cdiv(words, piece), 1)
    queues = tl.load(table_of(group) + QUEUES)
    begin_message(group, call, rank)
    used = tl.minimum(queues, pieces)
    source = rank
    status = 0
    if rank < 0:
        source, status = any_source(group, tag, SPEC)
        if status == 0:
            control = control_of(group)
            tl.store(control + RECV_SOURCE + ((call >> 32) % RECV_SOURCE_WORDS), source)
    block = tl.program_id(0).to(tl.int64)  # of the sender's `blocks`
    first_part = block
    while (block < blocks) & (status == 0):
        if first_part < used:
            queue = (first_part + tag) % queues
            mine = queue_state(group, table_of(group), source, queue)
            theirs = queue_state(group, peer(group, source), me, queue)
            following, taken = tl.load(mine + NEXT), tl.load(mine + RECEIVED_AHEAD)
            part = first_part
            while (part < pieces) & (status == 0):
                ahead, status = match_header(group, mine, source, following, taken, call, tag, SPEC)
                base = part * piece
                count = tl.maximum(tl.minimum(words - base, piece), 0)
                number = next_number(following, ahead)
                slot = slot_of(group, table_of(group), source, queue, number)
                first = tl.zeros([], tl.int64)
                while (first < count) & (status == 0):
                    if SPEC.LL:
                        tile = tl.multiple_of(slot + 2 * first, 16)
                        data, status = get_ll(group, tile, 0, number, count - first, 1, SPEC.BLOCK, SPEC.PTX)
                        if status == 0:
                            store_words(y_ptr, base + first, data[0], numel, SPEC.BLOCK, SPEC.ALIGNED)
                    else:
                        words_here = load_tile(slot, first, count, SPEC.BLOCK)
                        store_words(y_ptr, base + first, words_here, numel, SPEC.BLOCK, SPEC.ALIGNED)
                    first += SPEC.BLOCK
                if status == 0:
                    acknowledge(theirs, number, SPEC)
                    taken |= tl.full([], 1, tl.int64) << ahead
                    while (taken & 1) == 1:
                        taken >>= 1
                        following = next_number(following, 1)
                    part += queues
            if status == 0:
                tl.store(mine + NEXT, following)
                tl.store(mine + RECEIVED_AHEAD, taken)
            first_part += blocks
        else:
            block += tl.num_programs(0)
            first_part = block
    end_message(group, call, status)
