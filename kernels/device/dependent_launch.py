"""Programmatic dependent launch: a kernel begins while the one before it on the stream still runs.

    kernel e     ├ launch ┤├ wait, signal ┤├ epoch, push, poll, store ┤
    kernel e + 1                            ├ launch ┤├ wait ........... ┤├ signal ┤├ epoch, push, poll, store ┤

Only the launch and the prologue overlap: before its wait no kernel accesses memory that another kernel may write or
still read. So accesses have the same order as without overlap, and the mailbox protocol needs no change
(`devtools/mailbox_model/dependent_launches.py`). The signal comes after the wait, so at most one later kernel takes
room on the GPU while this one waits for its peers, and all blocks of this one are resident by then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_launches(SPEC: tl.constexpr):
    """Wait until the kernels before this one on the stream have ended and their writes are visible, then let the next
    kernel begin. Call it before the kernel's first access to memory, except to constants of the group table. Does
    nothing unless SPEC.DEPENDENT."""
    if SPEC.DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
