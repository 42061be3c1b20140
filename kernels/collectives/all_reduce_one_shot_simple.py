"""All-reduce, one shot, simple: stage the input, meet, read every peer's staged input, reduce locally.

    rank 0 [x0] ─▶ staged x0 ◀─ read by 1, 2, 3       y = x0 + x1 + x2 + x3   on every rank
    rank 1 [x1] ─▶ staged x1 ◀─ read by 0, 2, 3
    rank 2 [x2] ─▶ staged x2 ◀─ read by 0, 1, 3
    rank 3 [x3] ─▶ staged x3 ◀─ read by 0, 1, 2

Bytes     (N-1) n read from peers per rank; n staged in local memory.
Hops      1 barrier and one round trip.
Waits     header, release to acquire at `.sys`: what the peer's block b staged before it is visible to block b here.
Reuse     two stages, by the epoch's parity. This rank stages epoch e + 2 over e only after it has seen the peers'
          headers of e + 1, and those are released after the peers' reads of e.
Order     rank 0 .. N-1 on every rank, so every rank has the same bits.
Source    one-shot all-reduce of vLLM's custom all-reduce and of PyTorch's symmetric memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import SIMPLE_ROOM, clear_idle, simple_room
from tricomm.kernels.device.packing import load_tile, store_words
from tricomm.kernels.device.reduction import reduce_words
from tricomm.kernels.device.staging import stage
from tricomm.kernels.primitives import advance, barrier, enter, leave, peer


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_one_shot_simple(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                               ELEMENT: tl.constexpr, OP: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
                               LANES: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    start, owner = enter(group, call)
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
            for first in range(own, count, stride):
                parts = ()
                for r in tl.static_range(WORLD_SIZE):
                    there = simple_room(group, peer(group, r), epoch, 0, WORLD_SIZE)
                    parts = parts + (load_tile(there, first, count, BLOCK),)
                total = reduce_words(parts, ELEMENT, OP, BITS, WORLD_SIZE)
                store_words(y_ptr, base + first, total, numel, BLOCK, ALIGNED)
        chunk += 1
    leave(group, start, owner, call, chunks, status)
