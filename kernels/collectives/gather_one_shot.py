"""Gather, one shot, by every protocol: every rank pushes its data to the root, which copies it into rows.

    rank 0: [x0] ─┐
    rank 1: [x1] ─┼─▶ mailbox of root 2      y = [x0 x1 x2 x3]   on the root
    rank 3: [x3] ─┘

Bytes     n written to peers per rank but the root; under `ll` twice that, under `ll128` 4/3; (N-1) n reach the root.
Hops      1; under `simple` with a barrier after it, one per chunk; chunks overlap.
Waits     see `device/push.py`. A rank starts the next chunk only after the root's header, so it is one ahead at
          most.
Reuse     see `device/push.py`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_one_shot
from tricomm.kernels.device.push import first_tile_and_root, push_row, push_to_root, receive_rows


@triton.jit(do_not_specialize=["numel", "call", "root"])
def gather_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64, SPEC: tl.constexpr):
    run_one_shot(first_tile_and_root, push_to_root, _push, _take, (x_ptr, y_ptr, numel, root), group, call, SPEC)


@triton.jit
def _push(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root = tensors
    push_row(x_ptr, numel, root, chunk, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root = tensors
    return receive_rows(y_ptr, numel, chunk, chunk.me == root, status, SPEC)
