"""Broadcast, one shot, `ll` or `simple`: the root pushes its data into every peer's mailbox, each copies it out.

    root 1 [x] ──▶ mailboxes of 0, 2, 3      y = x on every rank

Bytes     (N-1) n written to peers by the root, under LL twice that; nothing by the others.
Hops      1; under `simple` with a barrier behind it.
Waits     see `parcels`. The root waits for every peer's header of every chunk, so it is one chunk ahead at most.
Reuse     see `parcels`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.packing import load_words, store_words
from tricomm.kernels.device.push import begin, meet, push_tile, room_words, take
from tricomm.kernels.primitives import RANK, advance, enter, leave


@triton.jit(do_not_specialize=["numel", "call", "root"])
def broadcast_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64,
                       LL: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                       ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    start, owner = enter(group, call)
    me = tl.load(group + RANK)
    words, room = tl.cdiv(numel, PACK), room_words(group, LL)
    chunks = tl.cdiv(words, room)
    own = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * room
        count = tl.minimum(words - base, room)
        begin(group, epoch, call, LL, WORLD_SIZE, BLOCK, LANES, PTX)
        if me == root:
            for first in range(own, count, stride):
                data = load_words(x_ptr, base + first, numel, BLOCK, ALIGNED)
                for step in range(1, WORLD_SIZE):
                    push_tile(group, (me + step) % WORLD_SIZE, epoch, first, data, count, LL, WORLD_SIZE, BLOCK, PTX)
        status = meet(group, epoch, call, LL, WORLD_SIZE, LANES, PTX)
        if me != root:
            first = own
            while (first < count) & (status == 0):
                part, status = take(group, root, epoch, first, count, 1, LL, WORLD_SIZE, BLOCK, PTX)
                if status == 0:
                    store_words(y_ptr, base + first, part[0], numel, BLOCK, ALIGNED)
                first += stride
        chunk += 1
    leave(group, start, owner, call, chunks, status)
