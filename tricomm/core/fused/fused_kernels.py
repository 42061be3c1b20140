"""The fused kernels of an all-reduce with an epilogue: which one takes a call, its plan, its launch."""

from __future__ import annotations

from tricomm.core.fused.fused_call import FusedCall
from tricomm.core.launch_plan import Bind, LaunchPlan, Request
from tricomm.core.launcher import Launcher
from tricomm.policy.selection import Choice, SelectionFacts


def choose(site: SelectionFacts, request: Request, mode: str) -> Choice | str:
    """The fused kernel for `request`, with `epilogue`, `dtype` and `elements` (rows * hidden), or why there is none.

    Pure, and the same on all ranks. Raises `InvalidArgument` if the caller forces a kernel that does not exist.
    """
    return "there is no fused kernel yet"


def make(site: SelectionFacts, choice: Choice, request: Request, aligned: bool, mode: str, bind: Bind) -> LaunchPlan:
    """The plan of `choice`, as `launch_plan.make`. `aligned`: all tensors of the call begin at multiples of 16."""
    raise NotImplementedError


def launch(launcher: Launcher, plan: LaunchPlan, call: FusedCall) -> None:
    """Launch a plan of `make`."""
    raise NotImplementedError
