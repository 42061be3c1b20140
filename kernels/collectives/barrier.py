"""Barrier: every rank sends a header to every peer, and waits for all of theirs. No data.

    rank r ──header──▶ every peer;  r continues when it has the header of every peer

Bytes     8 (N-1) written to peers per rank.
Hops      1.
Waits     header, release to acquire at `.sys`: a peer's writes before its barrier are visible here after this one.
Reuse     headers rotate by the epoch's parity, as in every kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import primitives
from tricomm.kernels.device.dependent_launch import wait_for_launches
from tricomm.kernels.device.mailbox import clear_idle
from tricomm.kernels.primitives import enter, leave


@triton.jit(do_not_specialize=["call"])
def barrier(group, call: tl.int64, SPEC: tl.constexpr):
    wait_for_launches(SPEC)
    start = enter(group, call)
    clear_idle(group, start, 1, SPEC)
    status = primitives.barrier(group, start, call, 0, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    leave(group, start, call, 1, status)
