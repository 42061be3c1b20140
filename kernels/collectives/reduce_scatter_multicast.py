"""Reduce-scatter through the switch, simple: stage all rows, barrier, have the switch reduce one's own row.

    rank 0: [a0 b0 c0 d0]      the switch adds, on its way to 0: a0 + a1 + a2 + a3
    rank 1: [a1 b1 c1 d1]                                     1: b0 + b1 + b2 + b3
    rank 2: [a2 b2 c2 d2]                                     2: c0 + c1 + c2 + c3
    rank 3: [a3 b3 c3 d3]                                     3: d0 + d1 + d2 + d3

Bytes     a GPU sends n (the bytes of its whole input) and receives 1/N n; without the switch it sends and receives
          (N-1)/N n. So the switch saves additions, not time on the links. Counted by accesses, (N-1)/N n of peers'
          memory is read; n is staged.
Hops      a barrier and a round trip; one barrier a chunk, and chunks overlap (`run_pushed` in `device/chunks.py`).
Waits     header, release to acquire at `.sys`: the data that block b of each peer staged may be read through the
          switch.
Reuse     two mailboxes, by the epoch's parity. A rank stages e + 2 after the barrier of e + 1, and every peer had read
          e through the switch before it sent that header.
Order     chosen by the switch, as in `all_reduce_multicast`.
Source    NCCL's symmetric kernel ReduceScatter_LDMC.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_pushed
from tricomm.kernels.device.mailbox import buffer_words
from tricomm.kernels.device.multicast import buffer_at_all, gather_reduced
from tricomm.kernels.device.plain_data import send_rows
from tricomm.kernels.multimem import everywhere


@triton.jit(do_not_specialize=["numel", "call"])
def reduce_scatter_multicast(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    tensors = (x_ptr, y_ptr, numel, everywhere(group, SPEC.WORLD_SIZE, SPEC.PTX))
    run_pushed(_stage, _take, tensors, group, call, buffer_words(group, 1, SPEC), SPEC)


@triton.jit
def _stage(tensors, chunk, SPEC: tl.constexpr):
    send_rows(tensors[0], tensors[2], chunk, True, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, heads = tensors
    given = buffer_at_all(chunk, heads, chunk.me, 0, SPEC)
    gather_reduced(given, given, y_ptr, chunk.base, chunk.count, numel, chunk, False, SPEC)
    return status
