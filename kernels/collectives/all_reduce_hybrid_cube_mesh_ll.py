"""All-reduce over a hybrid cube mesh, LL: push to the quad, push the quad's sum to the relay. No barrier.

    quad 0 1 2 3                        relay 0-4
    rank 0 [x0] ──▶ rooms of 1, 2, 3    rank 0: A = x0+x1+x2+x3 ──▶ rank 4     y = A + B   on every rank
    rank 1 [x1] ──▶ rooms of 0, 2, 3    rank 4: B = x4+x5+x6+x7 ──▶ rank 0
    ...

Bytes     per rank 6 n written to its quad, 2 n to its relay (half of them flags); for types narrower than 32 bits the
          sum crosses in accumulators: 4 n for 16 bits, 8 n for 8 (not for bitwise operations and bool). Nothing
          crosses a link that is not there.
Hops      2, both one way.
Waits     header, along links: the peer made the same call. Of the quad before its sum is passed on, of the relay
          before the other sum is used. word: its flag is this epoch; flag and payload are one access.
Reuse     see `cube`, headers: who writes epoch e + 2 knows that all eight ranks have left e.
Order     each quad in ascending rank order, in accumulators (fp32 for 16-bit floats); then the two sums, whose addition
          is commutative; rounded once. So all eight ranks hold the same bits.
Source    see `cube`; a push form of it is not known to be published.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import ll_room, ll_slot
from tricomm.kernels.device.mesh import PLACE, RANKS, RELAYED, in_quad, open_epoch, relay, send, wait
from tricomm.kernels.device.packing import load_words, store_words
from tricomm.kernels.device.reduction import accumulate, combine, finish
from tricomm.kernels.primitives import advance, enter, get_ll, leave, peer, put_ll


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_hybrid_cube_mesh_ll(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                                   ELEMENT: tl.constexpr, OP: tl.constexpr, WORLD_SIZE: tl.constexpr,
                                   BLOCK: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
                                   PTX: tl.constexpr):  # fmt: skip
    tl.static_assert(WORLD_SIZE == RANKS, "a hybrid cube mesh has eight ranks")
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PARTS: tl.constexpr = 1 if (BITS >= 32) | (ELEMENT == "int64") else 32 // BITS
    start, owner = enter(group, call)
    place = tl.load(group + PLACE)
    words = tl.cdiv(numel, 64 // BITS)
    room = ll_room(group) // 16  # payload words of a room
    chunks = tl.cdiv(words, room)
    own = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * room
        count = tl.minimum(words - base, room)
        open_epoch(group, epoch, call, False, WORLD_SIZE, BLOCK, LANES, PTX)
        for first in range(own, count, stride):
            mine = load_words(x_ptr, base + first, numel, BLOCK, ALIGNED)
            for step in range(4):  # 0 is the own room: that spares the sum a special case
                slot = ll_slot(group, peer(group, in_quad(group, step)), epoch, place, first, RANKS)
                put_ll(slot, mine, epoch, count - first, BLOCK, PTX)
        status = wait(group, epoch, call, 0, True, False, True, LANES, PTX)
        if status == 0:
            send(group, epoch, call, 0, False, True, False, LANES, PTX)
        first = own
        while (first < count) & (status == 0):
            slot = ll_slot(group, group, epoch, 0, first, RANKS)
            parts, status = get_ll(group, slot, 2 * room, epoch, count - first, 4, BLOCK, PTX)
            if status == 0:
                sums = accumulate(parts, ELEMENT, OP, BITS, 4)
                for n in tl.static_range(PARTS):
                    slot = ll_slot(group, peer(group, relay(group)), epoch, RELAYED + n, first, RANKS)
                    put_ll(slot, sums[n], epoch, count - first, BLOCK, PTX)
            first += stride
        if status == 0:
            status = wait(group, epoch, call, 0, False, True, True, LANES, PTX)
        first = own
        while (first < count) & (status == 0):
            slot = ll_slot(group, group, epoch, RELAYED, first, RANKS)
            theirs, status = get_ll(group, slot, 2 * room, epoch, count - first, PARTS, BLOCK, PTX)
            if status == 0:
                # The quad's words once more, from one's own memory: so no tile waits for the one before it.
                slot = ll_slot(group, group, epoch, 0, first, RANKS)
                parts, status = get_ll(group, slot, 2 * room, epoch, count - first, 4, BLOCK, PTX)
                both = combine(accumulate(parts, ELEMENT, OP, BITS, 4), theirs, ELEMENT, OP, BITS)
                total = finish(both, ELEMENT, OP, BITS, RANKS)
                store_words(y_ptr, base + first, total, numel, BLOCK, ALIGNED)
            first += stride
        chunk += 1
    leave(group, start, owner, call, chunks, status)
