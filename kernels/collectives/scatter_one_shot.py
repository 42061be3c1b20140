"""Scatter, one shot, `ll` or `simple`: the root pushes row r of its input to rank r.

    root 1 [a b c d] ──▶ a to 0, b to 1, c to 2, d to 3      y = the own row on every rank

Bytes     (N-1)/N n written to peers by the root (n the bytes of all rows), under LL twice that; nothing by the others.
Hops      1; under `simple` with a barrier behind it.
Waits     see `parcels`. The root waits for every peer's header of every chunk, so it is one chunk ahead at most.
Reuse     see `parcels`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.packing import store_words
from tricomm.kernels.device.push import begin, meet, push_rows, room_words, take
from tricomm.kernels.primitives import RANK, advance, enter, leave


@triton.jit(do_not_specialize=["numel", "call", "root"])
def scatter_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64,
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
        if me == root:
            push_rows(x_ptr, group, epoch, base, count, numel, LL, WORLD_SIZE, BLOCK, ALIGNED, PTX)
        status = meet(group, epoch, call, LL, WORLD_SIZE, LANES, PTX)
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while (first < count) & (status == 0):
            part, status = take(group, root, epoch, first, count, 1, LL, WORLD_SIZE, BLOCK, PTX)
            if status == 0:
                store_words(y_ptr, base + first, part[0], numel, BLOCK, ALIGNED)
            first += tl.num_programs(0) * BLOCK
        chunk += 1
    leave(group, start, owner, call, chunks, status)
