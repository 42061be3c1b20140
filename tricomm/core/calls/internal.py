"""Methods of a communicator for this library's own backends, adapters and tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tricomm.core.calls.fused_calls import FusedCalls
from tricomm.core.calls.point_to_point import PointToPoint
from tricomm.core.calls.prepared_calls import PreparedCalls
from tricomm.core.entry_guard import entry, guarded
from tricomm.core.faults import Faults
from tricomm.core.fused.fused_call import FusedCall
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.core.watch.monitor import FallbackBackend, Monitor
from tricomm.kernels import layout
from tricomm.policy import user_tables
from tricomm.policy.backend_choice import GroupFacts
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import Fingerprint
from tricomm.store.control import PackedDescriptor


class Internal:
    """One communicator's own calls and facts: `Communicator._internal`."""

    def __init__(
        self,
        group: Group,
        faults: Faults,
        monitor: Monitor,
        launcher: Launcher,
        planner: Planner,
        calls: PreparedCalls,
        fused: FusedCalls,
        messages: PointToPoint,
    ) -> None:
        self._group, self._faults, self._monitor, self._launcher = group, faults, monitor, launcher
        self._planner, self._calls, self._fused, self._messages = planner, calls, fused, messages
        self._guard, self._gpu, self._run = launcher.guard, group.gpu, calls.run

    # Calls

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
        """Let `repeat` make all_reduces of tensors like `x`, after a call with the same elements in another shape.
        False if such tensors need the checks of a first call."""
        return self._calls.remember(op, x)

    @guarded
    def run_fused(
        self, call: FusedCall, algorithm: str | None = None, protocol: str | None = None
    ) -> Sequence[LaunchPlan]:
        """Run a call that `fused_checks.checked` has made for this group's device; called by all ranks."""
        return self._fused.run_checked(call, algorithm, protocol)

    @guarded
    def announce(self, record: PackedDescriptor) -> None:
        """Tell the peers of a call that all ranks make by other means, so that a rank with a different one is named."""
        self._launcher.announce(record)

    @guarded
    def withdraw(self, calls: int) -> None:
        """Take back the last `calls` that were announced, because they were refused before anything was sent."""
        self._launcher.withdraw(calls)

    @guarded
    def unread(self) -> list[int]:
        """Ranks that have not received every message that this one has sent them."""
        return self._messages.unread()

    def interrupted(self, error: BaseException) -> None:
        """Abort the group because `error` has stopped this rank, and tell the others; does nothing if it is closed."""
        self._faults.interrupted(error)

    def watch(self, backend: FallbackBackend) -> None:
        """Ask `backend`, which makes calls besides the kernels, for its errors too, and abort it with the group."""
        self._monitor.watch(backend)

    def observe(self, observer: Callable[[Request, LaunchPlan], LaunchPlan]) -> None:
        """From now on keep what `observer` makes of each new plan."""
        self._planner.observer = observer

    # Facts

    @property
    def arena_layout(self) -> layout.Layout:
        """Where headers and mailboxes are in an arena."""
        return self._group.layout

    @property
    def most_blocks(self) -> int:
        """The largest grid whose blocks are surely resident together on every rank's device."""
        return self._group.max_blocks

    @property
    def peer_ranges(self) -> list[tuple[int, int]]:
        """(first address, bytes) of every rank's arena as mapped in this process."""
        return [(base, self._group.arena.nbytes) for base in self._group.arena.bases]

    @property
    def reachable(self) -> bool:
        """Whether every rank's memory is mapped on every other."""
        return self._group.reachable

    @property
    def site(self) -> SelectionFacts:
        """The facts that decide between the kernels."""
        return self._planner.site

    @property
    def routes(self) -> GroupFacts:
        """The facts that decide between the kernels and NCCL."""
        return self._planner.router.facts

    @property
    def fingerprint(self) -> Fingerprint:
        """The kind of box that this group runs on: tuning tables are keyed by it."""
        group = self._group
        return user_tables.fingerprint(group.device_class, group.device, group.world_size, group.topology)
