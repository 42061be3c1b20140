"""All-to-all, one shot, `ll` or `simple`: row r of the input to rank r, into the row of who sent it.

    rank 0 [a0 b0 c0 d0] ─▶ a0 to 0, b0 to 1, c0 to 2, d0 to 3      rank 0 gets [a0 a1 a2 a3]
    rank 1 [a1 b1 c1 d1] ─▶ a1 to 0, b1 to 1, c1 to 2, d1 to 3      rank 1 gets [b0 b1 b2 b3]
    rank 2 [a2 b2 c2 d2] ─▶ ...                                     rank 2 gets [c0 c1 c2 c3]
    rank 3 [a3 b3 c3 d3] ─▶ ...                                     rank 3 gets [d0 d1 d2 d3]

Bytes     (N-1)/N n written to peers per rank (n the bytes of its whole input), the least possible; under LL twice that.
          One's own row goes through one's own room, in one's own memory: that spares it a special case.
Hops      1; under `simple` with a barrier behind it.
Waits     see `parcels`.
Reuse     see `parcels`.
Order     nothing is summed.
Source    NCCL's symmetric all-to-all, MSCCL++'s packet all-to-all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.packing import store_words
from tricomm.kernels.device.push import begin, meet, push_rows, room_words, take
from tricomm.kernels.primitives import advance, enter, leave


@triton.jit(do_not_specialize=["numel", "call"])
def all_to_all_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                        LL: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                        ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    start, owner = enter(group, call)
    words, room = tl.cdiv(numel, PACK), room_words(group, LL)
    chunks = tl.cdiv(words, room)
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * room
        count = tl.minimum(words - base, room)
        begin(group, epoch, call, LL, WORLD_SIZE, BLOCK, LANES, PTX)
        push_rows(x_ptr, group, epoch, base, count, numel, LL, WORLD_SIZE, BLOCK, ALIGNED, PTX)
        status = meet(group, epoch, call, LL, WORLD_SIZE, LANES, PTX)
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while (first < count) & (status == 0):
            parts, status = take(group, 0, epoch, first, count, WORLD_SIZE, LL, WORLD_SIZE, BLOCK, PTX)
            if status == 0:
                for r in tl.static_range(WORLD_SIZE):
                    store_words(y_ptr + r * numel, base + first, parts[r], numel, BLOCK, ALIGNED)
            first += tl.num_programs(0) * BLOCK
        chunk += 1
    leave(group, start, owner, call, chunks, status)
