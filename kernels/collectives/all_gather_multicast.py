"""All-gather through the switch, simple: every rank stores its data once, to all mailboxes, and copies its mailbox out.

    rank 0: [x0] ──▶ switch ──▶ buffer 0 of 0, 1, 2, 3      y = [x0 x1 x2 x3]   on every rank
    rank 1: [x1] ──▶ switch ──▶ buffer 1 of 0, 1, 2, 3
    rank 2: [x2] ──▶ switch ──▶ buffer 2 of 0, 1, 2, 3
    rank 3: [x3] ──▶ switch ──▶ buffer 3 of 0, 1, 2, 3

Bytes     a GPU sends n (the bytes of one rank's part) and receives N n, its own part included: one n more than without
          the switch. So the switch saves stores, not time on the links. Counted by accesses, (N-1) n of peers' memory
          is written.
Hops      1, with a barrier after it, one per chunk; chunks overlap (`run_pushed` in `device/chunks.py`).
Waits     header, release to acquire at `.sys`: the data that block b of each peer stored has arrived.
Reuse     two mailboxes, by the epoch's parity. A peer stores e + 2 only after it has seen this block's header of e + 1,
          sent after this block has copied e.
Order     nothing is summed.
Source    NCCL's symmetric kernel AllGather_STMC; vLLM's triton_symm_mem_ag.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_pushed
from tricomm.kernels.device.mailbox import buffer_words
from tricomm.kernels.device.multicast import buffer_at_all, spread
from tricomm.kernels.device.plain_data import copy_rows
from tricomm.kernels.multimem import everywhere


@triton.jit(do_not_specialize=["numel", "call"])
def all_gather_multicast(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    tensors = (x_ptr, y_ptr, numel, everywhere(group, SPEC.WORLD_SIZE, SPEC.PTX))
    run_pushed(_spread, _take, tensors, group, call, buffer_words(group, 1, SPEC), SPEC)


@triton.jit
def _spread(tensors, chunk, SPEC: tl.constexpr):
    spread(tensors[0], tensors[2], buffer_at_all(chunk, tensors[3], chunk.me, 0, SPEC), chunk, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    copy_rows(tensors[1], tensors[2], False, chunk, SPEC)
    return status
