"""All-gather, one shot, LL: every rank pushes its data to every mailbox, polls its own, and copies it out.

    rank 0 [x0] ──▶ mailboxes of 0, 1, 2, 3      y = [x0 x1 x2 x3]   on every rank
    rank 1 [x1] ──▶ mailboxes of 0, 1, 2, 3
    rank 2 [x2] ──▶ mailboxes of 0, 1, 2, 3      word in a mailbox: 32 bits of payload | 32 bits of epoch
    rank 3 [x3] ──▶ mailboxes of 0, 1, 2, 3

Bytes     2 (N-1) n written to peers per rank (n the bytes of one rank's part; half of them flags).
Hops      1.
Waits     as in `all_reduce_one_shot_ll`: header for the fingerprint, flag in every word.
Reuse     as there: the header of e + 1 is sent after all words of e are polled.
Order     nothing is summed: a row is a copy.
Source    NCCL's symmetric kernel AllGather_LL.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import ll_room, ll_slot
from tricomm.kernels.device.packing import store_words
from tricomm.kernels.device.staging import open_epoch, push_to_all
from tricomm.kernels.primitives import advance, enter, get_ll, leave, wait_headers


@triton.jit(do_not_specialize=["numel", "call"])
def all_gather_one_shot_ll(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64,
                           WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                           ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    start, owner = enter(group, call)
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
        open_epoch(group, epoch, call, 1, WORLD_SIZE, BLOCK, LANES, PTX)
        push_to_all(x_ptr, group, epoch, base, count, numel, WORLD_SIZE, BLOCK, ALIGNED, PTX)
        status = wait_headers(group, epoch, call, 0, WORLD_SIZE, LANES, PTX)
        first = own
        while (first < count) & (status == 0):
            slot = ll_slot(group, group, epoch, 0, first, WORLD_SIZE)
            parts, status = get_ll(group, slot, 2 * room, epoch, count - first, WORLD_SIZE, BLOCK, PTX)
            if status == 0:
                for r in tl.static_range(WORLD_SIZE):
                    store_words(y_ptr + r * numel, base + first, parts[r], numel, BLOCK, ALIGNED)
            first += stride
        chunk += 1
    leave(group, start, owner, call, chunks, status)
