"""All-reduce over a hybrid cube mesh, simple: push to the quad, meet it, push its sum to the relay, meet the relay.

    quad 0 1 2 3                        relay 0-4
    rank 0 [x0] ──▶ rooms of 1, 2, 3    rank 0: A = x0+x1+x2+x3 ──▶ rank 4     y = A + B   on every rank
    rank 1 [x1] ──▶ rooms of 0, 2, 3    rank 4: B = x4+x5+x6+x7 ──▶ rank 0
    ...

Bytes     per rank 3 n written to its quad and n to its relay; for types narrower than 32 bits the sum crosses in
          accumulators: 2 n for 16 bits, 4 n for 8 (not for bitwise operations and bool). Nothing crosses a link
          that is not there.
Hops      2 one-way pushes, each followed by a barrier along its links.
Waits     header of the quad, release to acquire at `.sys`: what block b of each pushed here is visible. Header of the
          relay: so is its quad's sum.
Reuse     two mailboxes, by the epoch's parity; see `cube`, headers. The own sum waits in the second half of the rooms
          of the relay, which writes the first half only.
Order     as in `all_reduce_hybrid_cube_mesh_ll`: the same bits.
Source    see `cube`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import SIMPLE_ROOM, clear_idle, simple_room
from tricomm.kernels.device.mesh import PLACE, RANKS, RELAYED, in_quad, relay, send, wait
from tricomm.kernels.device.packing import load_tile, load_words, store_tile, store_words
from tricomm.kernels.device.reduction import accumulate, combine, finish
from tricomm.kernels.primitives import advance, enter, leave, peer


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_hybrid_cube_mesh_simple(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                                       ELEMENT: tl.constexpr, OP: tl.constexpr, WORLD_SIZE: tl.constexpr,
                                       BLOCK: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
                                       PTX: tl.constexpr):  # fmt: skip
    tl.static_assert(WORLD_SIZE == RANKS, "a hybrid cube mesh has eight ranks")
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PARTS: tl.constexpr = 1 if (BITS >= 32) | (ELEMENT == "int64") else 32 // BITS
    start, owner = enter(group, call)
    place = tl.load(group + PLACE)
    words = tl.cdiv(numel, 64 // BITS)
    half = tl.load(group + SIMPLE_ROOM) // 16  # words of half a room
    chunks = tl.cdiv(words, half)
    own = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * half
        count = tl.minimum(words - base, half)
        clear_idle(group, epoch, 1, WORLD_SIZE, BLOCK, LANES, PTX)
        for first in range(own, count, stride):
            mine = load_words(x_ptr, base + first, numel, BLOCK, ALIGNED)
            for step in range(4):  # 0 is the own room: that spares the sum a special case
                room = simple_room(group, peer(group, in_quad(group, step)), epoch, place, RANKS)
                store_tile(room, first, mine, count, BLOCK)
        send(group, epoch, call, 0, True, False, False, LANES, PTX)
        status = wait(group, epoch, call, 0, True, False, False, LANES, PTX)
        if status == 0:
            for first in range(own, count, stride):
                parts = ()
                for n in tl.static_range(4):
                    parts = parts + (load_tile(simple_room(group, group, epoch, n, RANKS), first, count, BLOCK),)
                sums = accumulate(parts, ELEMENT, OP, BITS, 4)
                for n in tl.static_range(PARTS):
                    kept = simple_room(group, group, epoch, RELAYED + n, RANKS) + half
                    store_tile(kept, first, sums[n], count, BLOCK)
                    room = simple_room(group, peer(group, relay(group)), epoch, RELAYED + n, RANKS)
                    store_tile(room, first, sums[n], count, BLOCK)
            send(group, epoch, call, 0, False, True, False, LANES, PTX)
            status = wait(group, epoch, call, 0, False, True, False, LANES, PTX)
        if status == 0:
            for first in range(own, count, stride):
                some, others = (), ()
                for n in tl.static_range(PARTS):
                    room = simple_room(group, group, epoch, RELAYED + n, RANKS)
                    some = some + (load_tile(room + half, first, count, BLOCK),)
                    others = others + (load_tile(room, first, count, BLOCK),)
                total = finish(combine(some, others, ELEMENT, OP, BITS), ELEMENT, OP, BITS, RANKS)
                store_words(y_ptr, base + first, total, numel, BLOCK, ALIGNED)
        chunk += 1
    leave(group, start, owner, call, chunks, status)
