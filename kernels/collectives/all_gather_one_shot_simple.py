"""All-gather, one shot, simple: stage the input, meet, copy every rank's staged input into its row.

    rank 0 [x0] ─▶ staged x0 ◀─ read by 1, 2, 3       y = [x0 x1 x2 x3]   on every rank
    rank 1 [x1] ─▶ staged x1 ◀─ read by 0, 2, 3
    rank 2 [x2] ─▶ staged x2 ◀─ read by 0, 1, 3
    rank 3 [x3] ─▶ staged x3 ◀─ read by 0, 1, 2

Bytes     (N-1) n read from peers per rank (n the bytes of one rank's part); n staged in local memory.
Hops      1 barrier and one round trip.
Waits     header, release to acquire at `.sys`: what the peer's block b staged before it is visible to block b here.
Reuse     as in `all_reduce_one_shot_simple`: headers of e + 1 are released after the reads of e.
Order     nothing is summed: a row is a copy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import SIMPLE_ROOM, clear_idle, simple_room
from tricomm.kernels.device.packing import load_tile, store_words
from tricomm.kernels.device.staging import stage
from tricomm.kernels.primitives import RANK, advance, barrier, enter, leave, peer


@triton.jit(do_not_specialize=["numel", "call"])
def all_gather_one_shot_simple(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                               WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                               ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    start, owner = enter(group, call)
    me = tl.load(group + RANK)
    words = tl.cdiv(numel, PACK)
    room = tl.load(group + SIMPLE_ROOM) // 8 * WORLD_SIZE  # all rooms of a parity, used as one stage
    chunks = tl.cdiv(words, room)
    own = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * room
        count = tl.minimum(words - base, room)
        clear_idle(group, epoch, 1, WORLD_SIZE, BLOCK, LANES, PTX)
        stage(x_ptr, group, epoch, base, count, numel, WORLD_SIZE, BLOCK, ALIGNED)
        status = barrier(group, epoch, call, 0, WORLD_SIZE, LANES, PTX)
        if status == 0:
            for step in range(WORLD_SIZE):
                source = (me + step) % WORLD_SIZE
                there = simple_room(group, peer(group, source), epoch, 0, WORLD_SIZE)
                for first in range(own, count, stride):
                    part = load_tile(there, first, count, BLOCK)
                    store_words(y_ptr + source * numel, base + first, part, numel, BLOCK, ALIGNED)
        chunk += 1
    leave(group, start, owner, call, chunks, status)
