"""All-gather over a hybrid cube mesh, simple: push to the quad and the relay, meet, pass on to the quad, meet.

    rank 0 [x0] ──▶ 1, 2, 3 and relay 4        rank 0: x4 ──▶ 1, 2, 3        y = [x0 .. x7]   on every rank
    rank 4 [x4] ──▶ 5, 6, 7 and relay 0        rank 1: x5 ──▶ 0, 2, 3
    ...                                        ...

Bytes     per rank 4 n, then 3 n written over links: 7 rows reach every rank, as they have to. Nothing crosses a link
          that is not there.
Hops      2 one-way pushes, each followed by a barrier along links.
Waits     header of the quad and the relay, release to acquire at `.sys`: their rows are here. Header of the quad once
          more: so is what it has passed on.
Reuse     two mailboxes, by the epoch's parity; see `cube`, headers: the quad's second ones are sent after the relay's
          are seen, so who has them knows that all eight ranks are in this epoch.
Order     nothing is summed.
Source    see `cube`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import SIMPLE_ROOM, clear_idle, simple_room
from tricomm.kernels.device.mesh import OTHER, POSITION, RANKS, in_quad, relay, send, wait
from tricomm.kernels.device.packing import load_tile, load_words, store_tile, store_words
from tricomm.kernels.primitives import RANK, advance, enter, leave, peer


@triton.jit(do_not_specialize=["numel", "call"])
def all_gather_hybrid_cube_mesh_simple(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                                       WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                                       ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    tl.static_assert(WORLD_SIZE == RANKS, "a hybrid cube mesh has eight ranks")
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    start, owner = enter(group, call)
    me, position = tl.load(group + RANK), tl.load(group + POSITION)
    words = tl.cdiv(numel, PACK)
    room = tl.load(group + SIMPLE_ROOM) // 8  # words of a room
    chunks = tl.cdiv(words, room)
    own = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * room
        count = tl.minimum(words - base, room)
        clear_idle(group, epoch, 1, WORLD_SIZE, BLOCK, LANES, PTX)
        for first in range(own, count, stride):
            mine = load_words(x_ptr, base + first, numel, BLOCK, ALIGNED)
            for step in range(5):
                to = relay(group) if step == 4 else in_quad(group, step % 4)
                store_tile(simple_room(group, peer(group, to), epoch, me, RANKS), first, mine, count, BLOCK)
        send(group, epoch, call, 0, True, True, False, LANES, PTX)
        status = wait(group, epoch, call, 0, True, True, False, LANES, PTX)
        if status == 0:
            source = relay(group)
            for first in range(own, count, stride):
                part = load_tile(simple_room(group, group, epoch, source, RANKS), first, count, BLOCK)
                for step in range(1, 4):
                    room_there = simple_room(group, peer(group, in_quad(group, step)), epoch, source, RANKS)
                    store_tile(room_there, first, part, count, BLOCK)
                store_words(y_ptr + source * numel, base + first, part, numel, BLOCK, ALIGNED)
            send(group, epoch, call, 1, True, False, False, LANES, PTX)
            status = wait(group, epoch, call, 1, True, False, False, LANES, PTX)
        if status == 0:
            for step in range(7):  # 0 to 3 one's own quad, then what its other three have passed on
                source = in_quad(group, step % 4)
                if step > 3:
                    source = tl.load(group + OTHER + (position ^ (step - 3)))
                for first in range(own, count, stride):
                    part = load_tile(simple_room(group, group, epoch, source, RANKS), first, count, BLOCK)
                    store_words(y_ptr + source * numel, base + first, part, numel, BLOCK, ALIGNED)
        chunk += 1
    leave(group, start, owner, call, chunks, status)
