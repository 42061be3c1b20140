"""Broadcast through the switch, simple: the root stores its data once, to all mailboxes, and the others copy it out.

    root 0: [x] ──▶ switch ──▶ buffer 0 of 0, 1, 2, 3      every rank but the root copies x out

Bytes     the root sends n, and every rank receives n, the root included; one shot without the switch has the root write
          (N-1) n. Counted by accesses, (N-1) n of peers' memory is written.
Hops      1, with a barrier after it, one per chunk; chunks overlap (`run_pushed` in `device/chunks.py`).
Waits     header, release to acquire at `.sys`: the data that block b of the root stored has arrived. Headers go from
          every rank to every other one, so that the root does not run ahead.
Reuse     two mailboxes, by the epoch's parity. The root stores e + 2 only after it has seen this block's header of
          e + 1, sent after this block has copied e.
Order     nothing is summed.
Source    NCCL's NVLS broadcast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_pushed
from tricomm.kernels.device.mailbox import buffer_words
from tricomm.kernels.device.multicast import buffer_at_all, spread
from tricomm.kernels.device.push import receive_row
from tricomm.kernels.multimem import everywhere


@triton.jit(do_not_specialize=["numel", "call", "root"])
def broadcast_multicast(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64, SPEC: tl.constexpr):
    tensors = (x_ptr, y_ptr, numel, root, everywhere(group, SPEC.WORLD_SIZE, SPEC.PTX))
    run_pushed(_spread, _take, tensors, group, call, buffer_words(group, 1, SPEC), SPEC)


@triton.jit
def _spread(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root, heads = tensors
    if chunk.me == root:
        spread(x_ptr, numel, buffer_at_all(chunk, heads, root, 0, SPEC), chunk, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root, heads = tensors
    return receive_row(y_ptr, numel, root, chunk, chunk.me != root, status, SPEC)
