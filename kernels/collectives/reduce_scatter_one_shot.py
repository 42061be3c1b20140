"""Reduce-scatter, one shot, by every protocol: row r of the input to rank r, which reduces what it receives.

    rank 0: [a0 b0 c0 d0] ─▶ a0 to 0, b0 to 1, c0 to 2, d0 to 3      rank 0 gets a0 + a1 + a2 + a3
    rank 1: [a1 b1 c1 d1] ─▶ a1 to 0, b1 to 1, c1 to 2, d1 to 3      rank 1 gets b0 + b1 + b2 + b3
    rank 2: [a2 b2 c2 d2] ─▶ ...                                     rank 2 gets c0 + c1 + c2 + c3
    rank 3: [a3 b3 c3 d3] ─▶ ...                                     rank 3 gets d0 + d1 + d2 + d3

Bytes     (N-1)/N n written to peers per rank (n the bytes of its whole input), the least possible without in-network
          reduction; under `ll` twice that, under `ll128` 4/3.
Hops      1; under `simple` with a barrier after it, one per chunk; chunks overlap.
Waits     see `device/push.py`.
Reuse     see `device/push.py`.
Order     rank 0 .. N-1: the bits of an all-reduce.
Source    the first half of `all_reduce_two_shot`.

Zero copy, out of symmetric memory: barrier, reduce one's own row out of every rank's memory, barrier.

    rank 0: [a0 b0 c0 d0]    0 reads a0 a1 a2 a3      rank 0 gets a0 + a1 + a2 + a3
    rank 1: [a1 b1 c1 d1]    1 reads b0 b1 b2 b3      rank 1 gets b0 + b1 + b2 + b3
    rank 2: [a2 b2 c2 d2]    2 reads c0 c1 c2 c3      rank 2 gets c0 + c1 + c2 + c3
    rank 3: [a3 b3 c3 d3]    3 reads d0 d1 d2 d3      rank 3 gets d0 + d1 + d2 + d3

Bytes     (N-1)/N n read from peers per rank; nothing is staged.
Hops      a barrier, a round trip, a barrier.
Waits     header of phase 0, release to acquire at `.sys`: data written to the peers' memory before this call is
          visible. Header of phase 1: no rank reads this rank's memory any more.
Reuse     there is no mailbox: the second barrier protects the memory. In place the output is this rank's own row, which
          no peer reads.
Order     rank 0 .. N-1, as above.
Source    the first half of `all_reduce_two_shot_zero_copy`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import packed_words, run_one_shot
from tricomm.kernels.device.dependent_launch import wait_for_launches
from tricomm.kernels.device.mailbox import clear_idle
from tricomm.kernels.device.packing import load_words, members, store_words
from tricomm.kernels.device.plain_data import push_plain_rows
from tricomm.kernels.device.push import first_tiles, push_rows, receive_reduced
from tricomm.kernels.group import rank_of
from tricomm.kernels.primitives import barrier, enter, leave
from tricomm.kernels.reduction import reduce_words


@triton.jit(do_not_specialize=["numel", "call"])
def reduce_scatter_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    run_one_shot(first_tiles, push_rows, push_plain_rows, _take, (x_ptr, y_ptr, numel), group, call, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    return receive_reduced(tensors[1], tensors[2], chunk, True, status, SPEC)


@triton.jit(do_not_specialize=["numel", "call"])
def reduce_scatter_one_shot_zero_copy(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, table, SPEC: tl.constexpr):
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    wait_for_launches(SPEC)
    start = enter(group, call)
    row = rank_of(group) * numel
    clear_idle(group, start, 1, SPEC)
    status = barrier(group, start, call, 0, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    if status == 0:
        words = packed_words(x_ptr, numel)
        inputs = members(table, x_ptr, WORLD_SIZE)
        for first in range(tl.program_id(0).to(tl.int64) * SPEC.BLOCK, words, tl.num_programs(0) * SPEC.BLOCK):
            parts = ()
            for r in tl.static_range(WORLD_SIZE):
                parts = parts + (load_words(inputs[r] + row, first, numel, SPEC.BLOCK, SPEC.ALIGNED),)
            store_words(y_ptr, first, reduce_words(parts, SPEC), numel, SPEC.BLOCK, SPEC.ALIGNED)
        status = barrier(group, start, call, 1, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    leave(group, start, call, 1, status)
