"""The user's handle of a channel, and the collaborators behind it.

Only the caller decides which channel a call takes, in the same way on every rank: nothing that only one rank knows,
such as a stream or the order of its threads, takes part in that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tricomm.core.channels.side_by_side import Functions
from tricomm.core.collectives import Collectives
from tricomm.core.entry_guard import entry
from tricomm.core.faults import Faults
from tricomm.core.fused.fused_collectives import FusedCollectives
from tricomm.core.fused.row_collectives import RowCollectives
from tricomm.core.group import Group
from tricomm.core.launcher import Launcher
from tricomm.core.monitor import Monitor
from tricomm.core.planner import Planner
from tricomm.errors import InvalidArgument, TricommError
from tricomm.metrics.counters import Activity
from tricomm.policy.backend_choice import BackendChoice
from tricomm.policy.tuning_tables import TunedTable


class Channel:
    """The collectives of a communicator over one of its channels: `Communicator.channel(number)`.

    Calls of one channel are ordered as those of a communicator, and are the same on all ranks; those of different
    channels are not ordered, and run side by side: on a GPU on different streams, on a CPU in different threads.
    Arguments, results and errors are the communicator's. A fault of one channel is the group's.
    """

    channels: Channels

    def __init__(
        self, group: Group, monitor: Monitor, activity: Activity, tuned: TunedTable | None,
        decided: BackendChoice | None = None,
    ) -> None:  # fmt: skip
        self._group, self._gpu = group, group.gpu
        self.faults = faults = Faults(group, monitor)
        self.launcher = launcher = Launcher(group, faults, monitor)
        self.planner = planner = Planner(group, faults, launcher, monitor, activity, tuned, decided)
        self.collectives = Collectives(group, faults, planner, launcher)
        self.fused = FusedCollectives(group, faults, planner, launcher)
        self.rows = RowCollectives(group, faults, planner, launcher)
        self._guard = launcher.guard

    all_reduce = entry(Collectives.all_reduce, "collectives")
    all_reduce_rms_norm = entry(FusedCollectives.all_reduce_rms_norm, "fused")
    all_reduce_rms_norm_quantized = entry(FusedCollectives.all_reduce_rms_norm_quantized, "fused")
    all_reduce_rows = entry(RowCollectives.all_reduce_rows, "rows")
    all_gather = entry(Collectives.all_gather, "collectives")
    reduce_scatter = entry(Collectives.reduce_scatter, "collectives")
    broadcast = entry(Collectives.broadcast, "collectives")
    reduce = entry(Collectives.reduce, "collectives")
    gather = entry(Collectives.gather, "collectives")
    scatter = entry(Collectives.scatter, "collectives")
    all_to_all = entry(Collectives.all_to_all, "collectives")
    all_to_all_v = entry(Collectives.all_to_all_v, "collectives")
    barrier = entry(Collectives.barrier, "collectives")
    synchronize = entry(Launcher.synchronize, "launcher")
    explain = entry(Planner.explain, "planner")

    @property
    def number(self) -> int:
        """From 0; a communicator's own methods use channel 0."""
        return self._group.channel

    @property
    def group_table(self) -> torch.Tensor:
        """`Communicator.group_table` of this channel."""
        return self._group.table

    def __repr__(self) -> str:
        return f"channel {self.number} of {self._group}"


class Channels:
    """All channels of a communicator; the first is the one that its own methods use."""

    def __init__(
        self, group: Group, monitor: Monitor, activity: Activity, tuned: TunedTable | None,
        decided: BackendChoice | None,
    ) -> None:  # fmt: skip
        self._all = tuple(Channel(each, monitor, activity, tuned, decided) for each in group.channels)
        self._group, self.first = group, self._all[0]
        self.first.planner.others = [channel.planner for channel in self._all[1:]]
        self.first.launcher.guard.beside = [channel.launcher.guard for channel in self._all[1:]]

    def channel(self, number: int) -> Channel:
        """The collectives over channel `number`, from 0 to `Options.channels` - 1; this object's own use channel 0.

        Calls of a channel run beside those of others: on a GPU on different streams, on a CPU in different threads.
        Raises `InvalidArgument` for a channel that does not exist.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self._all):
            raise InvalidArgument(
                f"channel {number!r}: this communicator has {len(self._all)}, numbered from 0; ask for more with "
                "Options(channels=...) on every rank"
            )
        if number and (why := self._group.routes.no_kernels) is not None:
            raise InvalidArgument(f"channel {number}: no kernel can run, and NCCL is behind channel 0 alone: {why}")
        self._all[number].channels = self  # for the user, who may keep nothing else of the communicator
        return self._all[number]

    def side_by_side(self, functions: Functions) -> list[Any]:
        """As `Communicator.side_by_side`."""
        strange = [function for function in functions if not callable(function)]
        if strange:
            raise InvalidArgument(f"side_by_side: functions without arguments are needed, found {strange[0]!r}")
        own: list[BaseException] = []

        def kept(function: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                try:
                    return function()
                except BaseException as error:
                    own.append(error)
                    raise

            return run

        try:
            return self._group.runtime.side_by_side([kept(function) for function in functions], self._group.gpu)
        except BaseException as error:
            # An error that no function raised has interrupted the wait for them: their calls end only with the group.
            if not any(error is each for each in own) and not isinstance(error, TricommError):
                self.first.faults.interrupted(error)
            raise

    @contextmanager
    def held(self, while_suspended: bool) -> Iterator[None]:
        """The locks of all channels; see `Launcher.held`."""
        control = self._group.control
        with ExitStack() as held:
            for channel in self._all:
                held.enter_context(channel.launcher.held(while_suspended))
            held.callback(setattr, control, "held_channels", control.held_channels)
            control.held_channels = len(self._all)
            yield

    def wait(self, timeout: float) -> None:
        """`Launcher.wait` for all channels."""
        for channel in self._all:
            channel.launcher.wait(timeout)

    def drained(self) -> bool:
        """`Launcher.drained` for all channels."""
        return all([channel.launcher.drained() for channel in self._all])

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph holds a call of any channel."""
        return any(channel.launcher.captured for channel in self._all)

    def forget(self) -> None:
        """Forget the plans of all calls."""
        for channel in self._all:
            channel.planner.forget()
