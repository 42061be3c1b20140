"""How a failed call of DDP's reducer ends `backward()`: with the call's own error.

The reducer waits in C++ for the futures of its buckets, and what it raises there is a RuntimeError with the text of the
call's error. A Python callback of the backward pass, which runs before the reducer's own, raises the error itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.autograd import graph

_TOP = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)


def raise_in_backward(work: Any) -> None:
    """Make the running backward pass raise what `work` fails with, if the call comes from C++; else do nothing.

    The reducer would wait for the call at the same place. A call that Python code makes is that code's to wait for.
    """
    if not _called_by_autograd():
        return
    if torch._C._current_autograd_node() is None:  # at the end already (a static graph's first pass), where it waits
        work.wait()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)


def _called_by_autograd() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("tricomm.c10d"):
        frame = frame.f_back
    return frame is None or frame.f_code is _TOP
