"""All-reduce, two shots, LL: push shard p to rank p, reduce one's own shard, push the result to all. No barrier.

    shards         a b c d         reduce-scatter            all-gather
    rank 0   [a0 b0 c0 d0]  ─▶  0 gets a0 a1 a2 a3 = A  ─▶  A to all
    rank 1   [a1 b1 c1 d1]  ─▶  1 gets b0 b1 b2 b3 = B  ─▶  B to all      y = [A B C D] on every rank
    rank 2   [a2 b2 c2 d2]  ─▶  2 gets c0 c1 c2 c3 = C  ─▶  C to all
    rank 3   [a3 b3 c3 d3]  ─▶  3 gets d0 d1 d2 d3 = D  ─▶  D to all

Bytes     4 (N-1)/N n written to peers per rank (half of them flags); nothing is read from a peer. A shard is rounded
          up to 16 bytes.
Hops      2.
Waits     header: the peer made the same call and has left the epoch before the last.
          word:   its flag is this epoch; flag and payload are one access. The two phases have a half of each room
          each, so a word of the second is never taken for one of the first.
Reuse     as in one shot: a peer writes e + 2 only after it has seen this block's header of e + 1, sent after this
          block has polled both halves of e.
Order     each element is reduced by one rank, rank 0 .. N-1, and copied: the same bits everywhere, and the bits of
          one shot, which reduces in the same order.
Source    reduce-scatter plus all-gather; the barrier-free form is MSCCL++'s two-shot packet all-reduce.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import ll_room, ll_slot
from tricomm.kernels.device.packing import end_of, load_words, shard_words, store_words
from tricomm.kernels.device.reduction import reduce_words
from tricomm.kernels.device.staging import open_epoch
from tricomm.kernels.primitives import (
    RANK,
    advance,
    enter,
    get_ll,
    leave,
    peer,
    put_ll,
    wait_headers,
)


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_two_shot_ll(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                           ELEMENT: tl.constexpr, OP: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
                           LANES: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    start, owner = enter(group, call)
    me = tl.load(group + RANK)
    words = tl.cdiv(numel, PACK)
    half = ll_room(group) // 32  # payload words of half a room
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
        open_epoch(group, epoch, call, 2, WORLD_SIZE, BLOCK, LANES, PTX)
        for step in range(WORLD_SIZE):
            to = (me + step) % WORLD_SIZE
            theirs = tl.minimum(count - to * shard, shard)
            there = base + to * shard
            for first in range(own, theirs, stride):
                mine = load_words(x_ptr, there + first, end_of(there + theirs, numel, PACK), BLOCK, ALIGNED)
                slot = ll_slot(group, peer(group, to), epoch, me, first, WORLD_SIZE)
                put_ll(slot, mine, epoch, theirs - first, BLOCK, PTX)
        status = wait_headers(group, epoch, call, 0, WORLD_SIZE, LANES, PTX)
        first = own
        ours = tl.minimum(count - me * shard, shard)
        here = base + me * shard
        while (first < ours) & (status == 0):
            slot = ll_slot(group, group, epoch, 0, first, WORLD_SIZE)
            parts, status = get_ll(group, slot, 4 * half, epoch, ours - first, WORLD_SIZE, BLOCK, PTX)
            if status == 0:
                total = reduce_words(parts, ELEMENT, OP, BITS, WORLD_SIZE)
                store_words(y_ptr, here + first, total, end_of(here + ours, numel, PACK), BLOCK, ALIGNED)
                for step in range(1, WORLD_SIZE):
                    to = (me + step) % WORLD_SIZE
                    slot = ll_slot(group, peer(group, to), epoch, me, half + first, WORLD_SIZE)
                    put_ll(slot, total, epoch, ours - first, BLOCK, PTX)
            first += stride
        for step in range(1, WORLD_SIZE):
            source = (me + step) % WORLD_SIZE
            theirs = tl.minimum(count - source * shard, shard)
            there = base + source * shard
            first = own
            while (first < theirs) & (status == 0):
                slot = ll_slot(group, group, epoch, source, half + first, WORLD_SIZE)
                part, status = get_ll(group, slot, 0, epoch, theirs - first, 1, BLOCK, PTX)
                if status == 0:
                    store_words(y_ptr, there + first, part[0], end_of(there + theirs, numel, PACK), BLOCK, ALIGNED)
                first += stride
        chunk += 1
    leave(group, start, owner, call, chunks, status)
