"""Programmatic dependent launch: a kernel begins while the one before it on the stream still runs.

    kernel e     ├ launch ┤├ wait, signal ┤├ epoch, push, poll, store ┤
    kernel e + 1                            ├ launch ┤├ wait ........... ┤├ signal ┤├ epoch, push, poll, store ┤

Only the launch and the prologue overlap: no kernel accesses memory that another kernel may write or still read before
its wait. Then accesses have the order of kernels one after another, and the mailbox protocol stays as it is
(`devtools/mailbox_model/dependent_launches.py`). The signal comes after the wait, so at most one later kernel takes
room on the GPU while this one waits for its peers, and all blocks of this one are resident by then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_launches(SPEC: tl.constexpr):
    """At the start of a kernel, before its first access to memory other than constants of the group table: wait until
    the kernels before it on the stream have ended and their writes are visible, then let the next one begin. Nothing
    unless SPEC.DEPENDENT."""
    if SPEC.DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
