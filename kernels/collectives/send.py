"""Send, `ll` or `simple`: one rank pushes a message through its queues to another.

    rank 2: [x] ──▶ slots of rank 0 ──▶ y of rank 0's recv

Bytes     n pushed, under LL twice that, and 16 of header per piece; 8 per piece come back as acknowledgement.
Hops      1; each piece of a queue from the fifth on waits for an acknowledgement, a second hop.
Waits     see `device/message_queues.py`. If all pieces of a message get free slots, the kernel ends without waiting for
          the receiver: so do four short messages of a tag. Any other send ends only when its receiver runs.
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
    SLOTS,
    begin_message,
    clear_stale,
    end_message,
    next_number,
    piece_words,
    publish_header,
    queue_state,
    slot_of,
    wait_free,
)
from tricomm.kernels.device.packing import load_words, store_tile
from tricomm.kernels.group import peer, rank_of, table_of
from tricomm.kernels.primitives import put_ll

SENT = tl.constexpr(layout.SENT)
PLAIN = tl.constexpr(layout.PLAIN)


@triton.jit(do_not_specialize=["numel", "call", "rank", "tag"])
def send(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, rank: tl.int64, tag: tl.int64, SPEC: tl.constexpr):
    wait_for_launches(SPEC)
    me = rank_of(group)
    rank, tag = rank.to(tl.int64), tag.to(tl.int64)  # the interpreter makes a small number an int32
    words = packed_words(x_ptr, numel)
    piece = piece_words(group, words, SPEC)
    pieces = tl.maximum(tl.cdiv(words, piece), 1)
    queues = tl.load(table_of(group) + QUEUES)
    begin_message(group, call, rank)
    first_part = tl.program_id(0).to(tl.int64)
    status = 0
    while (first_part < tl.minimum(queues, pieces)) & (status == 0):
        queue = (first_part + tag) % queues
        mine = queue_state(group, table_of(group), rank, queue)
        theirs = queue_state(group, peer(group, rank), me, queue)
        number, plain = tl.load(mine + SENT), tl.load(mine + PLAIN)
        part = first_part
        while (part < pieces) & (status == 0):
            status = wait_free(group, mine, number, SPEC)
            if status == 0:
                base = part * piece
                count = tl.maximum(tl.minimum(words - base, piece), 0)
                slot = slot_of(group, peer(group, rank), me, queue, number)
                bit = tl.full([], 1, tl.int64) << (number % SLOTS)
                if SPEC.LL:
                    cleared = clear_stale(group, slot, number, plain, SPEC)
                    for first in range(0, count, SPEC.BLOCK):
                        data = load_words(x_ptr, base + first, numel, SPEC.BLOCK, SPEC.ALIGNED)
                        put_ll(slot + 2 * first, data, number, count - first, SPEC.BLOCK, SPEC.PTX)
                    publish_header(theirs, number, call, tag, cleared, SPEC)
                    plain &= ~bit
                else:
                    for first in range(0, count, SPEC.BLOCK):
                        data = load_words(x_ptr, base + first, numel, SPEC.BLOCK, SPEC.ALIGNED)
                        store_tile(slot, first, data, count, SPEC.BLOCK)
                    publish_header(theirs, number, call, tag, True, SPEC)
                    plain |= bit
                number = next_number(number, 1)
                part += queues
        if status == 0:
            tl.store(mine + SENT, number)
            tl.store(mine + PLAIN, plain)
        first_part += tl.num_programs(0)
    end_message(group, call, status)
