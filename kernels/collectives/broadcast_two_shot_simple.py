"""Broadcast, two shots, simple: scatter the root's data, then every rank passes its shard on to all others.

    root 0 [a b c d]      a ──▶ 1, 2, 3           every rank but the root copies a, its own shard,
                          b ──▶ 1 ──▶ 2, 3        and what the others have passed on
                          c ──▶ 2 ──▶ 1, 3
                          d ──▶ 3 ──▶ 1, 2

Bytes     2 (N-1)/N n written to peers by the root (its own shard to all), (N-2)/N n by the others; one shot has the
          root write (N-1) n. A shard is rounded up to 16 bytes.
Hops      2 one-way pushes, each followed by a barrier.
Waits     header of phase 0, release to acquire at `.sys`: the root's shard for this rank is visible. Header of phase 1:
          so are the others'.
Reuse     two mailboxes, by the epoch's parity, half of each room for each phase. A peer writes e + 2 only after it has
          seen this block's header of e + 1, released after this block has read both halves of e.
Order     nothing is summed.
Source    van de Geijn's broadcast (scatter and all-gather), with direct exchanges for both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import SIMPLE_ROOM, clear_idle, simple_room
from tricomm.kernels.device.packing import end_of, load_tile, load_words, shard_words, store_tile, store_words
from tricomm.kernels.primitives import RANK, advance, barrier, enter, leave, peer


@triton.jit(do_not_specialize=["numel", "call", "root"])
def broadcast_two_shot_simple(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64,
                              WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                              ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
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
        if me == root:
            for step in range(1, WORLD_SIZE):
                to = (me + step) % WORLD_SIZE
                room = simple_room(group, peer(group, to), epoch, me, WORLD_SIZE)
                theirs = tl.minimum(count - to * shard, shard)
                there = base + to * shard
                for first in range(own, theirs, stride):
                    part = load_words(x_ptr, there + first, end_of(there + theirs, numel, PACK), BLOCK, ALIGNED)
                    store_tile(room, first, part, theirs, BLOCK)
        status = barrier(group, epoch, call, 0, WORLD_SIZE, LANES, PTX)
        if status == 0:
            ours = tl.minimum(count - me * shard, shard)
            here = base + me * shard
            limit = end_of(here + ours, numel, PACK)
            given = simple_room(group, group, epoch, root, WORLD_SIZE)
            for first in range(own, ours, stride):
                if me == root:
                    part = load_words(x_ptr, here + first, limit, BLOCK, ALIGNED)
                else:
                    part = load_tile(given, first, ours, BLOCK)
                    store_words(y_ptr, here + first, part, limit, BLOCK, ALIGNED)
                for step in range(1, WORLD_SIZE):
                    to = (me + step) % WORLD_SIZE
                    if to != root:
                        room = simple_room(group, peer(group, to), epoch, me, WORLD_SIZE) + half
                        store_tile(room, first, part, ours, BLOCK)
            status = barrier(group, epoch, call, 1, WORLD_SIZE, LANES, PTX)
        if (status == 0) & (me != root):
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
