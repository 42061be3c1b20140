"""All-to-all with uneven rows, one shot, `ll` or `simple`: any number of elements to each rank, none among them.

    rank 0 [a0 a0 a0 | b0 | c0 c0 | ]  ─▶ 3 to 0, 1 to 1, 2 to 2, 0 to 3     rank 0 gets [a0 a0 a0 | a1 | ...]
    ...

Bytes     what goes to others, written to peers; under LL twice that.
Hops      1; under `simple` with a barrier behind it.
Waits     as in `parcels`. Besides, in the first chunk each peer's two further headers: its longest row, so that all
          ranks go through the same number of chunks, which no rank knows alone; and the length of its row for this
          rank, which has to be what is expected here, or both ranks would wait for words that never come.
Reuse     see `parcels`; the further headers rotate with the epoch's parity as the first one does.
Order     nothing is summed.
Source    MPI_Alltoallv, by push.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.parcels import begin, meet, push_row, room_words, take
from tricomm.kernels.primitives import RANK, advance, enter, leave
from tricomm.kernels.splits import hear, tell
from tricomm.kernels.words import store_words


@triton.jit(do_not_specialize=["numel", "call"])
def all_to_all_v_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, splits,
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
            tell(group, splits, epoch, WORLD_SIZE, LANES, PTX)
        for step in range(WORLD_SIZE):
            to = (me + step) % WORLD_SIZE
            first, length = tl.load(splits + to), tl.load(splits + WORLD_SIZE + to)
            count = tl.minimum(tl.cdiv(length, PACK) - base, room)
            aligned = ALIGNED & (first % (2 * PACK) == 0)
            push_row(x_ptr + first, group, to, epoch, base, count, length, LL, WORLD_SIZE, BLOCK, aligned, PTX)
        status = meet(group, epoch, call, LL, WORLD_SIZE, LANES, PTX)
        if (chunk == 0) & (status == 0):
            most, status = hear(group, splits, epoch, WORLD_SIZE, LANES, PTX)
            chunks = tl.maximum(tl.cdiv(tl.cdiv(most, PACK), room), 1)
        for step in range(WORLD_SIZE):
            source = (me + step) % WORLD_SIZE
            row, length = tl.load(splits + 2 * WORLD_SIZE + source), tl.load(splits + 3 * WORLD_SIZE + source)
            count = tl.minimum(tl.cdiv(length, PACK) - base, room)
            aligned = ALIGNED & (row % (2 * PACK) == 0)
            first = tl.program_id(0).to(tl.int64) * BLOCK
            while (first < count) & (status == 0):
                part, status = take(group, source, epoch, first, count, 1, LL, WORLD_SIZE, BLOCK, PTX)
                if status == 0:
                    store_words(y_ptr + row, base + first, part[0], length, BLOCK, aligned)
                first += tl.num_programs(0) * BLOCK
        chunk += 1
    leave(group, start, owner, call, chunks, status)
