"""All-reduce of rows with an epilogue, two shots: push shard p of a row to rank p, reduce this rank's shard, push the
sums to all ranks, and run the epilogue on the whole row on every rank.

Each element is reduced by one rank, in the order rank 0 .. N-1, rounded once and copied: the bits of one shot.

    a row's shards  a b c d         reduce-scatter            all-gather
    rank 0:  [a0 b0 c0 d0]  ─▶  0 gets a0 a1 a2 a3 = A  ─▶  A to all
    rank 1:  [a1 b1 c1 d1]  ─▶  1 gets b0 b1 b2 b3 = B  ─▶  B to all      row = [A B C D], epilogue(row)  on every rank
    rank 2:  [a2 b2 c2 d2]  ─▶  2 gets c0 c1 c2 c3 = C  ─▶  C to all
    rank 3:  [a3 b3 c3 d3]  ─▶  3 gets d0 d1 d2 d3 = D  ─▶  D to all

The rounded sums are gathered, not the finished rows. Every rank needs both residual_out and the norm: finished rows
would be two tensors instead of one (three with scales), computed from the reducer's residual, whose bits may differ
between ranks. With rounded sums the links carry as much as in an all-reduce alone, and the result equals the unfused
sequence for any residual; the price is that each rank does the arithmetic of all rows. Each row is divided among the
ranks, so that a single row keeps all ranks' links busy.

Bytes     4 (N-1)/N n written to peers per rank under `ll` (half of them flags), 8/3 (N-1)/N n under `ll128`, as by the
          all-reduce alone. A shard of each row is rounded up to 16 bytes, for nvfp4 to 16 elements. The epilogue moves
          nothing over the links.
Hops      2.
Waits     header, polled with the words of the first hop: the peer made the same call and has left the epoch before the
          last. Words of each hop: the flag is this epoch, and flag and payload are one access. Each phase has its half
          of each buffer. The epilogue runs when the sums of all shards have arrived.
Reuse     as in `all_reduce_two_shot`: a peer writes e + 2 only after it has seen this block's header of e + 1, sent
          after this block has polled both halves of e. The epilogue reads no mailbox.
Source    reduce-scatter plus all-gather; FlashInfer's two-shot fusion also gathers sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.arrival import poll_planes
from tricomm.kernels.device.chunks import run_ll
from tricomm.kernels.device.mailbox import buffer_words
from tricomm.kernels.device.planes import reduce_planes
from tricomm.kernels.device.push import meet_ahead
from tricomm.kernels.device.rows import Row, fresh, of_step, own_tile, places, put_tile, rows_of
from tricomm.kernels.group import peer_ahead


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_rows_two_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, operands, SPEC: tl.constexpr):
    half = buffer_words(group, 2, SPEC)
    tensors = (x_ptr, y_ptr, numel, operands, half)
    run_ll(_load, _push, _take, tensors, group, call, half // SPEC.PITCH * SPEC.ROW, 2, SPEC)


@triton.jit
def _shards(x_ptr, operands, number, me, SPEC: tl.constexpr):
    """The tiles of row `number`, shard by shard starting with this rank's, step by step."""
    tiles = ()
    for ahead in tl.static_range(SPEC.WORLD_SIZE):
        for k in tl.static_range(SPEC.STEPS):
            start, left = _of_shard(_ahead(me, ahead, SPEC), k, SPEC)
            tiles = tiles + (own_tile(x_ptr, operands, number, start, left, SPEC.WHOLE, SPEC),)
    return tiles


@triton.jit
def _of_shard(shard, k: tl.constexpr, SPEC: tl.constexpr):
    """(first word in the row, words from there to the shard's end) of step k of a shard whose number is known at run
    time."""
    if SPEC.WHOLE:
        left = SPEC.TILE
    else:
        left = tl.minimum(SPEC.ROW - shard * SPEC.SHARD, SPEC.SHARD) - k * SPEC.TILE
    return shard * SPEC.SHARD + k * SPEC.TILE, left


@triton.jit
def _ahead(me, STEP: tl.constexpr, SPEC: tl.constexpr):
    """int32: rank (me + STEP) % WORLD_SIZE."""
    rank = me.to(tl.int32) + STEP
    if SPEC.WORLD_SIZE & (SPEC.WORLD_SIZE - 1) == 0:
        rank &= SPEC.WORLD_SIZE - 1
    else:
        rank = tl.where(rank < SPEC.WORLD_SIZE, rank, rank - SPEC.WORLD_SIZE)
    return rank


@triton.jit
def _load(tensors, chunk, SPEC: tl.constexpr):
    first, count, own, stride = rows_of(chunk, SPEC)
    return _shards(tensors[0], tensors[3], first + tl.minimum(own, count - 1), chunk.me, SPEC)


@triton.jit
def _push(tensors, chunk, tiles, SPEC: tl.constexpr):
    first, count, row, stride = rows_of(chunk, SPEC)
    if row < count:
        _push_row(chunk, row, tiles, SPEC)
    row += stride
    while row < count:  # one tile a round: with tiles carried from round to round, compiling takes minutes
        this = fresh(row, SPEC.PTX)
        _push_row(chunk, this, _shards(tensors[0], tensors[3], first + this, chunk.me, SPEC), SPEC)
        row += stride


@triton.jit
def _push_row(chunk, row, tiles, SPEC: tl.constexpr):
    """Push a row step by step, so that the first step is reduced while the links still carry the others."""
    for k in tl.static_range(SPEC.STEPS):
        for ahead in tl.static_range(SPEC.WORLD_SIZE):
            head = peer_ahead(chunk.group, ahead, SPEC.WORLD_SIZE)
            start, left = _of_shard(_ahead(chunk.me, ahead, SPEC), k, SPEC)
            put_tile(chunk, head, row * SPEC.PITCH + k * SPEC.TILE, tiles[ahead * SPEC.STEPS + k], left, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, operands, half = tensors
    first, count, row, stride = rows_of(chunk, SPEC)
    status = meet_ahead(chunk, row >= count, status, SPEC)
    while (row < count) & (status == 0):
        status = _reduce(chunk, fresh(row, SPEC.PTX), half, status, SPEC)
        row += stride
    row = tl.program_id(0).to(tl.int64)
    while (row < count) & (status == 0):
        this = fresh(row, SPEC.PTX)
        prepared = SPEC.PREPARE(first + this, operands, SPEC)
        planes = ()
        for k in tl.static_range(0, SPEC.STEPS, SPEC.TOGETHER):
            pointers, lefts = places(chunk, half + this * SPEC.PITCH + k * SPEC.TILE, SPEC), ()
            for n in tl.static_range(SPEC.TOGETHER * SPEC.WORLD_SIZE):
                lefts = lefts + (SPEC.LEFTS[k * SPEC.WORLD_SIZE + n],)
            tiles, late = poll_planes(chunk, pointers, lefts, SPEC.TOGETHER * SPEC.WORLD_SIZE, False, SPEC)
            for n in tl.static_range(SPEC.TOGETHER * SPEC.WORLD_SIZE):
                planes = planes + tiles[n]
            status = tl.maximum(status, late)
        if status == 0:
            SPEC.EPILOGUE(Row(first + this, planes, prepared, y_ptr), operands, SPEC)
        row += stride
    return status


@triton.jit
def _reduce(chunk, row, half, status, SPEC: tl.constexpr):
    """Reduce this rank's shard of a row and push the sums to every rank, this one included, because the epilogue reads
    all shards from the mailbox. Returns the status."""
    group, me = chunk.group, chunk.me
    for k in tl.static_range(0, SPEC.STEPS, SPEC.TOGETHER):
        pointers, lefts = places(chunk, row * SPEC.PITCH + k * SPEC.TILE, SPEC), ()
        for g in tl.static_range(SPEC.TOGETHER):
            start, left = _of_shard(me.to(tl.int32), k + g, SPEC)
            for _ in tl.static_range(SPEC.WORLD_SIZE):
                lefts = lefts + (left,)
        tiles, late = poll_planes(chunk, pointers, lefts, SPEC.TOGETHER * SPEC.WORLD_SIZE, k == 0, SPEC)
        status = tl.maximum(status, late)
        if status == 0:
            for g in tl.static_range(SPEC.TOGETHER):
                total = reduce_planes(of_step(tiles, g, SPEC), SPEC)
                for ahead in tl.static_range(SPEC.WORLD_SIZE):
                    head = peer_ahead(group, ahead, SPEC.WORLD_SIZE)
                    place = half + row * SPEC.PITCH + (k + g) * SPEC.TILE
                    put_tile(chunk, head, place, total, lefts[g * SPEC.WORLD_SIZE], SPEC)
    return status
