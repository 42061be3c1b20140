"""Methods of a communicator for the backends built on it; they are not public."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tricomm.core.calls.fused_calls import FusedCalls
from tricomm.core.calls.prepared_calls import PreparedCalls
from tricomm.core.entry_guard import entry, guarded
from tricomm.core.faults import Faults
from tricomm.core.fused.fused_call import FusedCall
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.core.watch.monitor import Monitor
from tricomm.store.control import PackedDescriptor


@dataclass(eq=False)
class Internal:
    """`Communicator._internal`: the parts of a communicator, and calls for backends."""

    group: Group
    faults: Faults
    monitor: Monitor
    launcher: Launcher
    planner: Planner
    calls: PreparedCalls
    fused: FusedCalls

    def __post_init__(self) -> None:
        self._guard, self._gpu, self._run = self.launcher.guard, self.group.gpu, self.calls.run

    @entry
    def repeat(self, op: str, x: torch.Tensor) -> bool:
        """Repeat an all_reduce in place. False, with nothing done, if it is new or needs the checks of a first call."""
        try:
            return self._run(("all_reduce", op, None, None, -1, True), x, known_only=True) is not None
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @guarded
    def remember(self, op: str, x: torch.Tensor) -> bool:
        """Let `repeat` make all_reduces of tensors like `x`, after a call with the same number of elements in another
        shape. False if such tensors need the checks of a first call."""
        return self.calls.remember(op, x)

    @guarded
    def run_fused(
        self, call: FusedCall, algorithm: str | None = None, protocol: str | None = None
    ) -> Sequence[LaunchPlan]:
        """Run a call that `fused_call.checked` has checked for this group's device; called by all ranks."""
        return self.fused.run_checked(call, algorithm, protocol)

    @guarded
    def announce(self, descriptor: PackedDescriptor, made: tuple[Any, ...]) -> None:
        """Announce a call that all ranks make by another backend, so that a rank with a different call is detected."""
        self.launcher.announce(descriptor, made)

    @guarded
    def withdraw(self, calls: int) -> None:
        """Withdraw the last `calls` that were announced, because they were refused before anything was sent."""
        self.launcher.withdraw(calls)
