"""All-reduce of rows with an epilogue, one shot: every rank gets every rank's rows, reduces and finishes them.

The order is rank 0 .. N-1 on every rank, rounded once: the bits of `all_reduce_one_shot`, and the same on every rank.

    rank 0: [x0] ──▶ mailboxes of 0, 1, 2, 3      row = x0 + x1 + x2 + x3, epilogue(row)   on every rank
    rank 1: [x1] ──▶ mailboxes of 0, 1, 2, 3
    rank 2: [x2] ──▶ mailboxes of 0, 1, 2, 3      a block takes whole rows: row r of a chunk is block r % grid's
    rank 3: [x3] ──▶ mailboxes of 0, 1, 2, 3

A row stays in registers from its sum to its end. The epilogue's other operands (residual, weight) are loaded before the
wait for the row.

Bytes     2 (N-1) n written to peers per rank under `ll` (half of them flags), 4/3 (N-1) n under `ll128`, as by the
          all-reduce alone; nothing is read from a peer, and the epilogue moves nothing over the links. A rank's own
          rows go through its own memory.
Hops      1.
Waits     as in `all_reduce_one_shot`: polls for tiles of a row from all ranks, with the first of each row for the
          headers: the peer made the same call (its fingerprint covers rows, hidden size and epilogue) and has left
          the epoch before the last. The epilogue runs when all words of the row have arrived from all ranks.
Reuse     two mailboxes, by the epoch's parity, as in `all_reduce_one_shot`: a peer's block writes epoch e + 2 over e
          after it has seen this block's header of e + 1, sent after this block has polled all its rows of e. The
          epilogue reads no mailbox.
Source    one-shot Lamport all-reduce with fused RMSNorm of TensorRT-LLM and FlashInfer; here with flags in the data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.arrival import poll_planes
from tricomm.kernels.device.chunks import run_ll
from tricomm.kernels.device.mailbox import buffer_words
from tricomm.kernels.device.planes import reduce_planes
from tricomm.kernels.device.push import meet_ahead
from tricomm.kernels.device.rows import Row, fresh, of_step, own_row, places, put_tile, rows_of
from tricomm.kernels.group import peer_ahead


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_rows_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, operands, SPEC: tl.constexpr):
    tensors = (x_ptr, y_ptr, numel, operands)
    chunk = buffer_words(group, 1, SPEC) // SPEC.PITCH * SPEC.ROW
    run_ll(_load, _push, _take, tensors, group, call, chunk, 1, SPEC)


@triton.jit
def _load(tensors, chunk, SPEC: tl.constexpr):
    first, count, own, stride = rows_of(chunk, SPEC)
    return own_row(tensors[0], tensors[3], first + tl.minimum(own, count - 1), SPEC)


@triton.jit
def _push(tensors, chunk, tiles, SPEC: tl.constexpr):
    first, count, row, stride = rows_of(chunk, SPEC)
    if row < count:
        _push_row(chunk, row, tiles, SPEC)
    row += stride
    while row < count:  # one tile a round: with tiles carried from round to round, compiling takes minutes
        this = fresh(row, SPEC.PTX)
        _push_row(chunk, this, own_row(tensors[0], tensors[3], first + this, SPEC), SPEC)
        row += stride


@triton.jit
def _push_row(chunk, row, tiles, SPEC: tl.constexpr):
    """Push a row to each rank, starting at this one, so that no two ranks write to the same rank at the same time."""
    for i in tl.static_range(SPEC.ROW_TILES):
        for step in tl.static_range(SPEC.WORLD_SIZE):
            head = peer_ahead(chunk.group, step, SPEC.WORLD_SIZE)
            put_tile(chunk, head, row * SPEC.PITCH + i * SPEC.TILE, tiles[i], SPEC.LEFTS[i], SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, operands = tensors
    first, count, row, stride = rows_of(chunk, SPEC)
    status = meet_ahead(chunk, row >= count, status, SPEC)
    while (row < count) & (status == 0):
        this = fresh(row, SPEC.PTX)
        prepared = SPEC.PREPARE(first + this, operands, SPEC)
        planes = ()
        for i in tl.static_range(0, SPEC.STEPS, SPEC.TOGETHER):
            pointers, lefts = places(chunk, this * SPEC.PITCH + i * SPEC.TILE, SPEC), ()
            for g in tl.static_range(SPEC.TOGETHER):
                for _ in tl.static_range(SPEC.WORLD_SIZE):
                    lefts = lefts + (SPEC.LEFTS[i + g],)
            tiles, late = poll_planes(chunk, pointers, lefts, SPEC.TOGETHER * SPEC.WORLD_SIZE, i == 0, SPEC)
            for g in tl.static_range(SPEC.TOGETHER):
                planes = planes + reduce_planes(of_step(tiles, g, SPEC), SPEC)
            status = tl.maximum(status, late)
        if status == 0:
            SPEC.EPILOGUE(Row(first + this, planes, prepared, y_ptr), operands, SPEC)
        row += stride
    return status
