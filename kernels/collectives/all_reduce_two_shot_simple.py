"""All-reduce, two shots, simple: push shard p to rank p, meet, reduce one's own shard, push the result, meet, copy.

    shards         a b c d         reduce-scatter            all-gather
    rank 0   [a0 b0 c0 d0]  ─▶  0 gets a0 a1 a2 a3 = A  ─▶  A to all
    rank 1   [a1 b1 c1 d1]  ─▶  1 gets b0 b1 b2 b3 = B  ─▶  B to all      y = [A B C D] on every rank
    rank 2   [a2 b2 c2 d2]  ─▶  2 gets c0 c1 c2 c3 = C  ─▶  C to all
    rank 3   [a3 b3 c3 d3]  ─▶  3 gets d0 d1 d2 d3 = D  ─▶  D to all

Bytes     2 (N-1)/N n written to peers per rank, the least that any algorithm without in-network reduction can do;
          nothing is read from a peer. A shard is rounded up to 16 bytes. A rank's own shard goes through its own
          room, in its own memory: that spares the reduction a special case.
Hops      2 one-way pushes, each followed by a barrier.
Waits     header of phase 0, release to acquire at `.sys`: the shards that block b of each peer pushed here are
          visible. Header of phase 1: so are the results.
Reuse     two mailboxes, by the epoch's parity, half of each room for each phase. A peer writes e + 2 only after it
          has seen this block's header of e + 1, released after this block has read both halves of e.
Order     each element is reduced by one rank, rank 0 .. N-1, and copied: the same bits everywhere, and those of
          one shot.
Source    reduce-scatter plus all-gather (Rabenseifner); vLLM's two-stage custom all-reduce, here by push.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import SIMPLE_ROOM, clear_idle, simple_room
from tricomm.kernels.device.packing import end_of, load_tile, load_words, shard_words, store_tile, store_words
from tricomm.kernels.device.reduction import reduce_words
from tricomm.kernels.primitives import RANK, advance, barrier, enter, leave, peer


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_two_shot_simple(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                               ELEMENT: tl.constexpr, OP: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
                               LANES: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    start, owner = enter(group, call)
    me = tl.load(group + RANK)
    words = tl.cdiv(numel, PACK)
    half = tl.load(group + SIMPLE_ROOM) // 16  # words of half a room
    chunks = tl.cdiv(words, half * WORLD_SIZE)
    own = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * half * WORLD_SIZE
        count = tl.minimum(words - base, half * WORLD_SIZE)
        shard = shard_words(count, WORLD_SIZE)
        clear_idle(group, epoch, 2, WORLD_SIZE, BLOCK, LANES, PTX)
        for step in range(WORLD_SIZE):
            to = (me + step) % WORLD_SIZE
            room = simple_room(group, peer(group, to), epoch, me, WORLD_SIZE)
            theirs = tl.minimum(count - to * shard, shard)
            there = base + to * shard
            for first in range(own, theirs, stride):
                mine = load_words(x_ptr, there + first, end_of(there + theirs, numel, PACK), BLOCK, ALIGNED)
                store_tile(room, first, mine, theirs, BLOCK)
        status = barrier(group, epoch, call, 0, WORLD_SIZE, LANES, PTX)
        if status == 0:
            ours = tl.minimum(count - me * shard, shard)
            here = base + me * shard
            limit = end_of(here + ours, numel, PACK)
            for first in range(own, ours, stride):
                parts = ()
                for r in tl.static_range(WORLD_SIZE):
                    room = simple_room(group, group, epoch, r, WORLD_SIZE)
                    parts = parts + (load_tile(room, first, ours, BLOCK),)
                total = reduce_words(parts, ELEMENT, OP, BITS, WORLD_SIZE)
                store_words(y_ptr, here + first, total, limit, BLOCK, ALIGNED)
                for step in range(1, WORLD_SIZE):
                    to = (me + step) % WORLD_SIZE
                    room = simple_room(group, peer(group, to), epoch, me, WORLD_SIZE) + half
                    store_tile(room, first, total, ours, BLOCK)
            status = barrier(group, epoch, call, 1, WORLD_SIZE, LANES, PTX)
        if status == 0:
            for step in range(1, WORLD_SIZE):
                source = (me + step) % WORLD_SIZE
                room = simple_room(group, group, epoch, source, WORLD_SIZE) + half
                theirs = tl.minimum(count - source * shard, shard)
                there = base + source * shard
                for first in range(own, theirs, stride):
                    part = load_tile(room, first, theirs, BLOCK)
                    store_words(y_ptr, there + first, part, end_of(there + theirs, numel, PACK), BLOCK, ALIGNED)
        chunk += 1
    leave(group, start, owner, call, chunks, status)
