"""All-gather over a hybrid cube mesh, LL: push to the quad and the relay, pass on to the quad what the relay sent.

    rank 0 [x0] ──▶ 1, 2, 3 and relay 4        rank 0: x4 ──▶ 1, 2, 3        y = [x0 .. x7]   on every rank
    rank 4 [x4] ──▶ 5, 6, 7 and relay 0        rank 1: x5 ──▶ 0, 2, 3
    ...                                        ...

Bytes     per rank 8 n, then 6 n written over links (half of them flags): 7 rows reach every rank, as they have to.
          Nothing crosses a link that is not there.
Hops      2, both one way.
Waits     header, along links: the peer made the same call; of the quad once more, before what it has passed on is
          used. word: its flag is this epoch; flag and payload are one access.
Reuse     see `cube`, headers: the quad's second ones are sent after the relay's are seen, so who has them knows that
          all eight ranks are in this epoch.
Order     nothing is summed.
Source    see `cube`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import ll_room, ll_slot
from tricomm.kernels.device.mesh import OTHER, POSITION, RANKS, in_quad, open_epoch, relay, send, wait
from tricomm.kernels.device.packing import load_words, store_words
from tricomm.kernels.primitives import RANK, advance, enter, get_ll, leave, peer, put_ll


@triton.jit(do_not_specialize=["numel", "call"])
def all_gather_hybrid_cube_mesh_ll(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                                   WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                                   ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    tl.static_assert(WORLD_SIZE == RANKS, "a hybrid cube mesh has eight ranks")
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    start, owner = enter(group, call)
    me, position = tl.load(group + RANK), tl.load(group + POSITION)
    words = tl.cdiv(numel, PACK)
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
        open_epoch(group, epoch, call, True, WORLD_SIZE, BLOCK, LANES, PTX)
        for first in range(own, count, stride):
            mine = load_words(x_ptr, base + first, numel, BLOCK, ALIGNED)
            for step in range(5):
                to = relay(group) if step == 4 else in_quad(group, step % 4)
                slot = ll_slot(group, peer(group, to), epoch, me, first, RANKS)
                put_ll(slot, mine, epoch, count - first, BLOCK, PTX)
        status = wait(group, epoch, call, 0, True, True, True, LANES, PTX)
        if status == 0:
            send(group, epoch, call, 1, True, False, False, LANES, PTX)
        first = own
        while (first < count) & (status == 0):
            source = relay(group)
            slot = ll_slot(group, group, epoch, source, first, RANKS)
            part, status = get_ll(group, slot, 0, epoch, count - first, 1, BLOCK, PTX)
            if status == 0:
                for step in range(1, 4):
                    slot = ll_slot(group, peer(group, in_quad(group, step)), epoch, source, first, RANKS)
                    put_ll(slot, part[0], epoch, count - first, BLOCK, PTX)
                store_words(y_ptr + source * numel, base + first, part[0], numel, BLOCK, ALIGNED)
            first += stride
        if status == 0:
            status = wait(group, epoch, call, 1, True, False, True, LANES, PTX)
        for step in range(7):  # 0 to 3 one's own quad, then what its other three have passed on
            source = in_quad(group, step % 4)
            if step > 3:
                source = tl.load(group + OTHER + (position ^ (step - 3)))
            first = own
            while (first < count) & (status == 0):
                slot = ll_slot(group, group, epoch, source, first, RANKS)
                part, status = get_ll(group, slot, 0, epoch, count - first, 1, BLOCK, PTX)
                if status == 0:
                    store_words(y_ptr + source * numel, base + first, part[0], numel, BLOCK, ALIGNED)
                first += stride
        chunk += 1
    leave(group, start, owner, call, chunks, status)
