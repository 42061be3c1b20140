"""All-reduce over a hybrid cube mesh, two shots, simple: reduce-scatter in the quad, relay, all-gather in the quad.

    quad 0 1 2 3, shards a b c d        relays                      quad
    rank 0 gets a0 a1 a2 a3 = A    ─▶   0-4: A + A' on both    ─▶   A + A' to 1, 2, 3
    rank 1 gets b0 b1 b2 b3 = B    ─▶   1-5: B + B' on both    ─▶   B + B' to 0, 2, 3     y = all four, everywhere
    rank 2 gets c0 c1 c2 c3 = C    ─▶   2-6: C + C' on both    ─▶   C + C' to 0, 1, 3
    rank 3 gets d0 d1 d2 d3 = D    ─▶   3-7: D + D' on both    ─▶   D + D' to 0, 1, 2

Bytes     per rank 3/4 n to its quad, 1/4 n to its relay, 3/4 n to its quad: 1.75 n, what a ring moves. For types
          narrower than 32 bits the sum crosses in accumulators: 2.0 n for 16 bits, 2.5 n for 8 (not for bitwise
          operations and bool). A shard is rounded up to 16 bytes. Nothing crosses a link that is not there.
Hops      3 one-way pushes, each followed by a barrier along its links.
Waits     headers, release to acquire at `.sys`: of the quad, the shards are here; of the relay, the other quad's sum
          is; of the quad once more, the other shards' results are.
Reuse     two mailboxes, by the epoch's parity; see `cube`, headers. Half of each room for each of the first and last
          phase; the own sum waits in the second half of the relay's rooms, which writes the first half only.
Order     as in `all_reduce_hybrid_cube_mesh_ll`: the same bits. A shard belongs to a position, so that both ends of a
          relay link own the same one.
Source    the two-shot form of `cube`; not known to be published.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import SIMPLE_ROOM, clear_idle, simple_room
from tricomm.kernels.device.mesh import PLACE, POSITION, RANKS, RELAYED, in_quad, relay, send, wait
from tricomm.kernels.device.packing import end_of, load_tile, load_words, shard_words, store_tile, store_words
from tricomm.kernels.device.reduction import accumulate, combine, finish
from tricomm.kernels.primitives import advance, enter, leave, peer


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_hybrid_cube_mesh_two_shot_simple(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                                                ELEMENT: tl.constexpr, OP: tl.constexpr, WORLD_SIZE: tl.constexpr,
                                                BLOCK: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
                                                PTX: tl.constexpr):  # fmt: skip
    tl.static_assert(WORLD_SIZE == RANKS, "a hybrid cube mesh has eight ranks")
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    PARTS: tl.constexpr = 1 if (BITS >= 32) | (ELEMENT == "int64") else 32 // BITS
    start, owner = enter(group, call)
    place, position = tl.load(group + PLACE), tl.load(group + POSITION)
    words = tl.cdiv(numel, PACK)
    half = tl.load(group + SIMPLE_ROOM) // 16  # words of half a room
    chunks = tl.cdiv(words, 4 * half)
    own = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * 4 * half
        count = tl.minimum(words - base, 4 * half)
        shard = shard_words(count, 4)
        ours = tl.minimum(count - position * shard, shard)
        here = base + position * shard
        clear_idle(group, epoch, 1, WORLD_SIZE, BLOCK, LANES, PTX)
        for step in range(4):  # 0 is the own room: that spares the sum a special case
            theirs = tl.minimum(count - (position ^ step) * shard, shard)
            there = base + (position ^ step) * shard
            room = simple_room(group, peer(group, in_quad(group, step)), epoch, place, RANKS)
            for first in range(own, theirs, stride):
                mine = load_words(x_ptr, there + first, end_of(there + theirs, numel, PACK), BLOCK, ALIGNED)
                store_tile(room, first, mine, theirs, BLOCK)
        send(group, epoch, call, 0, True, False, False, LANES, PTX)
        status = wait(group, epoch, call, 0, True, False, False, LANES, PTX)
        if status == 0:
            for first in range(own, ours, stride):
                parts = ()
                for n in tl.static_range(4):
                    parts = parts + (load_tile(simple_room(group, group, epoch, n, RANKS), first, ours, BLOCK),)
                sums = accumulate(parts, ELEMENT, OP, BITS, 4)
                for n in tl.static_range(PARTS):
                    kept = simple_room(group, group, epoch, RELAYED + n, RANKS) + half
                    store_tile(kept, first, sums[n], ours, BLOCK)
                    room = simple_room(group, peer(group, relay(group)), epoch, RELAYED + n, RANKS)
                    store_tile(room, first, sums[n], ours, BLOCK)
            send(group, epoch, call, 0, False, True, False, LANES, PTX)
            status = wait(group, epoch, call, 0, False, True, False, LANES, PTX)
        if status == 0:
            limit = end_of(here + ours, numel, PACK)
            for first in range(own, ours, stride):
                some, others = (), ()
                for n in tl.static_range(PARTS):
                    room = simple_room(group, group, epoch, RELAYED + n, RANKS)
                    some = some + (load_tile(room + half, first, ours, BLOCK),)
                    others = others + (load_tile(room, first, ours, BLOCK),)
                total = finish(combine(some, others, ELEMENT, OP, BITS), ELEMENT, OP, BITS, RANKS)
                store_words(y_ptr, here + first, total, limit, BLOCK, ALIGNED)
                for step in range(1, 4):
                    room = simple_room(group, peer(group, in_quad(group, step)), epoch, position, RANKS) + half
                    store_tile(room, first, total, ours, BLOCK)
            send(group, epoch, call, 1, True, False, False, LANES, PTX)
            status = wait(group, epoch, call, 1, True, False, False, LANES, PTX)
        if status == 0:
            for step in range(1, 4):
                room = simple_room(group, group, epoch, position ^ step, RANKS) + half
                theirs = tl.minimum(count - (position ^ step) * shard, shard)
                there = base + (position ^ step) * shard
                for first in range(own, theirs, stride):
                    part = load_tile(room, first, theirs, BLOCK)
                    store_words(y_ptr, there + first, part, end_of(there + theirs, numel, PACK), BLOCK, ALIGNED)
        chunk += 1
    leave(group, start, owner, call, chunks, status)
