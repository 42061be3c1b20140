"""All-gather out of symmetric memory, one shot: meet, copy everybody's input from where it lies, meet.

    rank 0 [w0] ◀─ read by 1, 2, 3       y = [w0 w1 w2 w3]   on every rank
    rank 1 [w1] ◀─ read by 0, 2, 3
    rank 2 [w2] ◀─ read by 0, 1, 3
    rank 3 [w3] ◀─ read by 0, 1, 2

Bytes     (N-1) n read from peers per rank (n the bytes of one rank's part); nothing is staged.
Hops      a barrier, a round trip, a barrier.
Waits     as in `all_reduce_one_shot_zero_copy`.
Reuse     as there: the second barrier.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import clear_idle
from tricomm.kernels.device.packing import load_words, member, store_words
from tricomm.kernels.primitives import RANK, barrier, enter, leave


@triton.jit(do_not_specialize=["numel", "call"])
def all_gather_one_shot_zero_copy(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, table,
                                  WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                                  ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    start, owner = enter(group, call)
    me = tl.load(group + RANK)
    clear_idle(group, start, 1, WORLD_SIZE, BLOCK, LANES, PTX)
    status = barrier(group, start, call, 0, WORLD_SIZE, LANES, PTX)
    if status == 0:
        words = tl.cdiv(numel, 64 // x_ptr.dtype.element_ty.primitive_bitwidth)
        for step in range(WORLD_SIZE):  # from the own rank on: no two ranks read from the same one at the same time
            source = (me + step) % WORLD_SIZE
            for first in range(tl.program_id(0).to(tl.int64) * BLOCK, words, tl.num_programs(0) * BLOCK):
                part = load_words(member(table, source, x_ptr), first, numel, BLOCK, True)
                store_words(y_ptr + source * numel, first, part, numel, BLOCK, ALIGNED)
        status = barrier(group, start, call, 1, WORLD_SIZE, LANES, PTX)
    leave(group, start, owner, call, 1, status)
