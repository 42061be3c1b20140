"""All-to-all, one shot, by every protocol: row r of the input to rank r, into the row of its sender.

    rank 0: [a0 b0 c0 d0] ─▶ a0 to 0, b0 to 1, c0 to 2, d0 to 3      rank 0 gets [a0 a1 a2 a3]
    rank 1: [a1 b1 c1 d1] ─▶ a1 to 0, b1 to 1, c1 to 2, d1 to 3      rank 1 gets [b0 b1 b2 b3]
    rank 2: [a2 b2 c2 d2] ─▶ ...                                     rank 2 gets [c0 c1 c2 c3]
    rank 3: [a3 b3 c3 d3] ─▶ ...                                     rank 3 gets [d0 d1 d2 d3]

Bytes     (N-1)/N n written to peers per rank (n the bytes of its whole input), the least possible; under `ll` twice
          that, under `ll128` 4/3. A rank also pushes its own row, into its own buffer, so that the row needs no special
          case.
Hops      1; under `simple` with a barrier after it, one per chunk; chunks overlap.
Waits     see `device/push.py`.
Reuse     see `device/push.py`.
Order     nothing is summed.
Source    NCCL's symmetric all-to-all, MSCCL++'s packet all-to-all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_one_shot
from tricomm.kernels.device.plain_data import push_plain_rows
from tricomm.kernels.device.push import first_tiles, push_rows, receive_rows


@triton.jit(do_not_specialize=["numel", "call"])
def all_to_all_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    run_one_shot(first_tiles, push_rows, push_plain_rows, _take, (x_ptr, y_ptr, numel), group, call, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    return receive_rows(tensors[1], tensors[2], chunk, True, status, SPEC)
