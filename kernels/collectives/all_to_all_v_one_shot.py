"""All-to-all with uneven parts, one shot, `ll` or `simple`: any number of rows to each rank, none among them.

    rank 0 [a0 a0 a0 | b0 | c0 c0 | ]  sends (3, 1, 2, 0)      rank 0 gets [a0 a0 a0 | a1 | | a3 a3]  takes (3, 1, 0, 2)
    rank 1 [a1 | | | d1]               sends (1, 0, 0, 1)      rank 1 gets [b0 | | b2 b2 | ]          takes (1, 0, 2, 0)
    ...

Lengths   `sends` and `takes`, in rows of `numel` elements, are parameters of the launch (`splits`): every call has its
          own, without memory, a copy or another compiled kernel; a captured call keeps those of its capture. Where a
          part begins is the sum of those before it.
Bytes     what goes to others, written to peers; under LL twice that.
Hops      1; under `simple` with a barrier behind it.
Waits     as in `parcels`. Besides, in the first chunk each peer's two further headers: its longest part, so that all
          ranks go through the same number of chunks, which no rank knows alone; and the length of its part for this
          rank, which has to be what is expected here, or both ranks would wait for words that never come. They carry
          the lengths from rank to rank: parameters are known to one rank alone, and the fingerprint leaves them out.
Reuse     see `parcels`; the further headers rotate with the epoch's parity as the first one does.
Order     nothing is summed.
Source    MPI_Alltoallv, by push.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.counts import hear, part, tell
from tricomm.kernels.device.packing import store_words
from tricomm.kernels.device.push import begin, meet, push_row, room_words, take
from tricomm.kernels.primitives import RANK, advance, enter, leave


@triton.jit(do_not_specialize=["numel", "call"])
def all_to_all_v_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, sends, takes,
                          LL: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
                          ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    start, owner = enter(group, call)
    me = tl.load(group + RANK)
    room = room_words(group, LL)
    chunks = tl.zeros([], tl.int64) + 1  # until the others have told
    status = 0
    chunk = tl.zeros([], tl.int64)
    while (chunk < chunks) & (status == 0):
        epoch = advance(start, chunk)
        base = chunk * room
        begin(group, epoch, call, LL, WORLD_SIZE, BLOCK, LANES, PTX)
        if chunk == 0:
            tell(group, sends, numel, epoch, WORLD_SIZE, LANES, PTX)
        for step in range(WORLD_SIZE):
            to = (me + step) % WORLD_SIZE
            first, length = part(sends, to, numel, WORLD_SIZE)
            count = tl.minimum(tl.cdiv(length, PACK) - base, room)
            aligned = ALIGNED & (first % (2 * PACK) == 0)
            push_row(x_ptr + first, group, to, epoch, base, count, length, LL, WORLD_SIZE, BLOCK, aligned, PTX)
        status = meet(group, epoch, call, LL, WORLD_SIZE, LANES, PTX)
        if (chunk == 0) & (status == 0):
            most, status = hear(group, sends, takes, numel, epoch, WORLD_SIZE, LANES, PTX)
            chunks = tl.maximum(tl.cdiv(tl.cdiv(most, PACK), room), 1)
        for step in range(WORLD_SIZE):
            source = (me + step) % WORLD_SIZE
            row, length = part(takes, source, numel, WORLD_SIZE)
            count = tl.minimum(tl.cdiv(length, PACK) - base, room)
            aligned = ALIGNED & (row % (2 * PACK) == 0)
            first = tl.program_id(0).to(tl.int64) * BLOCK
            while (first < count) & (status == 0):
                tile, status = take(group, source, epoch, first, count, 1, LL, WORLD_SIZE, BLOCK, PTX)
                if status == 0:
                    store_words(y_ptr + row, base + first, tile[0], length, BLOCK, aligned)
                first += tl.num_programs(0) * BLOCK
        chunk += 1
    leave(group, start, owner, call, chunks, status)
