"""Gather, one shot, `ll` or `simple`: every rank pushes its data to the root, which copies it into a row each.

    rank 0 [x0] ─┐
    rank 1 [x1] ─┼─▶ mailbox of root 2      y = [x0 x1 x2 x3]   on the root
    rank 3 [x3] ─┘

Bytes     n written to peers per rank but the root, under LL twice that; (N-1) n reach the root.
Hops      1; under `simple` with a barrier behind it.
Waits     see `parcels`. A rank goes on to the next chunk only after the root's header, so it is one ahead at most.
Reuse     see `parcels`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.packing import store_words
from tricomm.kernels.device.push import begin, meet, push_row, room_words, take
from tricomm.kernels.primitives import RANK, advance, enter, leave


@triton.jit(do_not_specialize=["numel", "call", "root"])
def gather_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64,
                    LL: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                    ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    start, owner = enter(group, call)
    me = tl.load(group + RANK)
    words, room = tl.cdiv(numel, PACK), room_words(group, LL)
    chunks = tl.cdiv(words, room)
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * room
        count = tl.minimum(words - base, room)
        begin(group, epoch, call, LL, WORLD_SIZE, BLOCK, LANES, PTX)
        push_row(x_ptr, group, root, epoch, base, count, numel, LL, WORLD_SIZE, BLOCK, ALIGNED, PTX)
        status = meet(group, epoch, call, LL, WORLD_SIZE, LANES, PTX)
        if me == root:
            first = tl.program_id(0).to(tl.int64) * BLOCK
            while (first < count) & (status == 0):
                parts, status = take(group, 0, epoch, first, count, WORLD_SIZE, LL, WORLD_SIZE, BLOCK, PTX)
                if status == 0:
                    for r in tl.static_range(WORLD_SIZE):
                        store_words(y_ptr + r * numel, base + first, parts[r], numel, BLOCK, ALIGNED)
                first += tl.num_programs(0) * BLOCK
        chunk += 1
    leave(group, start, owner, call, chunks, status)
