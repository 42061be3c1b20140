"""All-reduce in place in symmetric memory, two shots: meet, reduce one's own shard out of everybody's, write it back.

    shards         a b c d
    rank 0   [a0 b0 c0 d0]    0 reads a0 a1 a2 a3, writes their sum A into a of all
    rank 1   [a1 b1 c1 d1]    1 reads b0 b1 b2 b3, writes their sum B into b of all      w = [A B C D] on every rank
    rank 2   [a2 b2 c2 d2]    2 reads c0 c1 c2 c3, writes their sum C into c of all
    rank 3   [a3 b3 c3 d3]    3 reads d0 d1 d2 d3, writes their sum D into d of all

Bytes     (N-1)/N n read from peers and (N-1)/N n written to them per rank; nothing is staged. A shard is rounded up to
          16 bytes.
Hops      a barrier, a round trip, a one-way push, a barrier.
Waits     header of phase 0, release to acquire at `.sys`: what was written to the peers' memory before this call is
          visible. Header of phase 1: so are the results, and nobody reads or writes this rank's memory any more.
Reuse     there is no mailbox: the rotation protects nothing here, the second barrier does. A shard is read and written
          by its owner alone, so the results need no third barrier before they are written.
Order     each element is reduced by one rank, rank 0 .. N-1, and copied: the same bits everywhere, and those of every
          other all-reduce in rank order.
Source    the two-stage kernels of vLLM and of PyTorch's symmetric memory, which write back as this one does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import clear_idle
from tricomm.kernels.device.packing import end_of, load_words, members, shard_words, store_everywhere
from tricomm.kernels.device.reduction import reduce_words
from tricomm.kernels.primitives import RANK, barrier, enter, leave


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_two_shot_zero_copy(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, table,
                                  ELEMENT: tl.constexpr, OP: tl.constexpr, WORLD_SIZE: tl.constexpr,
                                  BLOCK: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
                                  PTX: tl.constexpr):  # fmt: skip
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    start, owner = enter(group, call)
    me = tl.load(group + RANK)
    words = tl.cdiv(numel, PACK)
    clear_idle(group, start, 1, WORLD_SIZE, BLOCK, LANES, PTX)
    status = barrier(group, start, call, 0, WORLD_SIZE, LANES, PTX)
    if status == 0:
        shard = shard_words(words, WORLD_SIZE)
        here = me * shard
        ours = tl.minimum(words - here, shard)
        limit = end_of(here + ours, numel, PACK)
        everybody = members(table, x_ptr, WORLD_SIZE)
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, ours, tl.num_programs(0) * BLOCK):
            parts = ()
            for r in tl.static_range(WORLD_SIZE):
                parts = parts + (load_words(everybody[r], here + first, limit, BLOCK, ALIGNED),)
            total = reduce_words(parts, ELEMENT, OP, BITS, WORLD_SIZE)
            store_everywhere(everybody, here + first, total, limit, WORLD_SIZE, BLOCK, ALIGNED)
        status = barrier(group, start, call, 1, WORLD_SIZE, LANES, PTX)
    leave(group, start, owner, call, 1, status)
