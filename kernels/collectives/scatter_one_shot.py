"""Scatter, one shot, `ll` or `simple`: the root pushes row r of its input to rank r.

    root 1 [a b c d] ──▶ a to 0, b to 1, c to 2, d to 3      y = the own row on every rank

Bytes     (N-1)/N n written to peers by the root (n the bytes of all rows), under LL twice that; nothing by the others.
Hops      1; under `simple` with a barrier behind it, one a chunk; chunks overlap.
Waits     see `device/push.py`. The root waits for every peer's header of every chunk, so it is one chunk ahead at most.
Reuse     see `device/push.py`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_pushed
from tricomm.kernels.device.mailbox import buffer_words
from tricomm.kernels.device.push import push_rows, receive_row


@triton.jit(do_not_specialize=["numel", "call", "root"])
def scatter_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64, SPEC: tl.constexpr):
    run_pushed(_push, _take, (x_ptr, y_ptr, numel, root), group, call, buffer_words(group, 1, SPEC), SPEC)


@triton.jit
def _push(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root = tensors
    if chunk.me == root:
        push_rows(x_ptr, numel, chunk, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root = tensors
    return receive_row(y_ptr, numel, root, chunk, status, SPEC)
