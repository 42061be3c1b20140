"""All-reduce out of symmetric memory, one shot: meet, read everybody's input where it lies, reduce locally, meet.

    rank 0 [w0] ◀─ read by 1, 2, 3       y = w0 + w1 + w2 + w3   on every rank
    rank 1 [w1] ◀─ read by 0, 2, 3
    rank 2 [w2] ◀─ read by 0, 1, 3
    rank 3 [w3] ◀─ read by 0, 1, 2

Bytes     (N-1) n read from peers per rank; nothing is staged.
Hops      a barrier, a round trip, a barrier.
Waits     header of phase 0, release to acquire at `.sys`: what was written to the peers' memory before this call is
          visible. Header of phase 1: nobody reads this rank's memory any more.
Reuse     there is no mailbox: the rotation protects nothing here, the second barrier does.
Order     rank 0 .. N-1 on every rank: the same bits, and those of every other all-reduce in rank order.
Source    one-shot all-reduce of PyTorch's symmetric memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import clear_idle
from tricomm.kernels.device.packing import load_words, members, store_words
from tricomm.kernels.device.reduction import reduce_words
from tricomm.kernels.primitives import barrier, enter, leave


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_one_shot_zero_copy(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, table,
                                  ELEMENT: tl.constexpr, OP: tl.constexpr, WORLD_SIZE: tl.constexpr,
                                  BLOCK: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
                                  PTX: tl.constexpr):  # fmt: skip
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    start, owner = enter(group, call)
    clear_idle(group, start, 1, WORLD_SIZE, BLOCK, LANES, PTX)
    status = barrier(group, start, call, 0, WORLD_SIZE, LANES, PTX)
    if status == 0:
        words = tl.cdiv(numel, 64 // BITS)
        everybody = members(table, x_ptr, WORLD_SIZE)
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, words, tl.num_programs(0) * BLOCK):
            parts = ()
            for r in tl.static_range(WORLD_SIZE):
                parts = parts + (load_words(everybody[r], first, numel, BLOCK, True),)
            total = reduce_words(parts, ELEMENT, OP, BITS, WORLD_SIZE)
            store_words(y_ptr, first, total, numel, BLOCK, ALIGNED)
        status = barrier(group, start, call, 1, WORLD_SIZE, LANES, PTX)
    leave(group, start, owner, call, 1, status)
