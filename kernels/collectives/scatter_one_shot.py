"""Scatter, one shot, by every protocol: the root pushes row r of its input to rank r.

    root 1: [a b c d] ──▶ a to 0, b to 1, c to 2, d to 3      y = its row on every rank

Bytes     (N-1)/N n written to peers by the root (n the bytes of all rows); under `ll` twice that, under `ll128` 4/3;
          nothing by the others.
Hops      1; under `simple` with a barrier after it, one per chunk; chunks overlap.
Waits     see `device/push.py`. The root waits for every peer's header of every chunk, so it is one chunk ahead at most.
Reuse     see `device/push.py`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_one_shot
from tricomm.kernels.device.plain_data import push_plain_rows
from tricomm.kernels.device.planes import no_tile
from tricomm.kernels.device.push import first_tiles, push_rows, receive_row


@triton.jit(do_not_specialize=["numel", "call", "root"])
def scatter_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64, SPEC: tl.constexpr):
    run_one_shot(_first_tiles, _push_ll, _push, _take, (x_ptr, y_ptr, numel, root), group, call, SPEC)


@triton.jit
def _first_tiles(tensors, chunk, SPEC: tl.constexpr):
    if SPEC.ROWS_AT_ONCE:
        tiles = ()
        for _ in tl.static_range(SPEC.WORLD_SIZE):
            tiles = tiles + (no_tile(SPEC),)
    else:
        tiles = no_tile(SPEC)
    if chunk.me == tensors[3]:
        tiles = first_tiles(tensors, chunk, SPEC)
    return tiles


@triton.jit
def _push_ll(tensors, chunk, tiles, SPEC: tl.constexpr):
    if chunk.me == tensors[3]:
        push_rows(tensors, chunk, tiles, SPEC)


@triton.jit
def _push(tensors, chunk, SPEC: tl.constexpr):
    if chunk.me == tensors[3]:
        push_plain_rows(tensors, chunk, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root = tensors
    return receive_row(y_ptr, numel, root, chunk, True, status, SPEC)
