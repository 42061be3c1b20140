"""Suspends a communicator: its memory is given back, and its addresses are kept for the graphs captured over them.

    awake ── suspend: no call in flight on any rank, all give their memory back ──▶ asleep
    asleep ── resume: new memory, zeroed, at the same addresses, begun as at first ──▶ awake

Both are collective, in stages: after each of them all ranks go on, or none. A suspend that is refused leaves the group
awake, a resume that is refused leaves it asleep. The monitor goes on, because the control page stays.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

from tricomm.core.calls.point_to_point import PointToPoint
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launcher import Launcher
from tricomm.deadline import Deadline
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.store.arena import Arena
from tricomm.store.collective_stages import CollectiveStages

log = logging.getLogger("tricomm")


class Suspension:
    """Suspends and resumes one group."""

    def __init__(self, group: Group, faults: Faults, launcher: Launcher, messages: PointToPoint) -> None:
        self._group, self._faults, self._launcher, self._messages = group, faults, launcher, messages

    def suspend(self) -> None:
        """Give this communicator's memory back to the device, on all ranks, and keep its addresses.

        Collective: one thread of each rank calls it, once its other threads have made the same calls on all ranks.
        Waits for calls in flight, for this communicator's timeout at most. Captured graphs, plans and symmetric handles
        stay valid, and work again after `resume`; the contents of symmetric memory are lost. Until then every call is
        refused without consuming a sequence number, except `resume`, `close` and those that ask no other rank. No graph
        with a call of this communicator may be replayed: its kernels would touch addresses with nothing behind them. A
        rank that dies meanwhile is noticed as usual. NCCL keeps its memory.

        Raises on all ranks, with the group awake: `InvalidArgument` if one is suspended already, captures a graph, has
        sent messages that were not received, or has closed other symmetric handles than the rest, and for memory that
        cannot come back at its addresses (cuda_ipc); `ResourceError` if memory cannot be given back, and then the
        contents of symmetric memory are lost all the same. `CollectiveMismatch`, with the group lost, if another rank
        is in a call that this one has not made.
        """
        group, control = self._group, self._group.control
        self._faults.check_usable()
        with self._launcher.held(while_suspended=False), self._faults.abort_on_error("suspend"):
            control.agree(self._refusal(), "suspend", group.timeout, abort_on_fault=True)
            self._launcher.wait(group.timeout)
            control.agree(None, "suspend: calls in flight", group.timeout, abort_on_fault=True)
            control.agree(self._unread(), "suspend: messages", group.timeout)
            self._require_same_handles("suspend")
            self._sleep(True)
            stage = CollectiveStages(control, "suspend", Deadline(group.timeout))
            try:
                stage("give memory back", self._give_back)
            except ResourceError as error:
                self._wake_after(error)

    def resume(self) -> None:
        """Take zeroed memory at the addresses that `suspend` has kept, on all ranks, so that calls are possible again.

        Collective, by one thread of each rank. Raises on all ranks, with the group suspended, so that it can be tried
        again: `InvalidArgument` if it is not suspended, or if symmetric handles were closed meanwhile on some ranks
        only; `ResourceError` if memory is refused.
        """
        group = self._group
        if not group.suspended or group.closed:
            self._faults.check_usable()
            raise InvalidArgument(f"{group}: not suspended, so there is nothing to resume; suspend() comes first")
        self._faults.check()
        with self._launcher.held(while_suspended=True), self._faults.abort_on_error("resume"):
            group.control.agree(group.captured("resume"), "resume", group.timeout, abort_on_fault=True)
            self._require_same_handles("resume")
            self._take_again()

    def _refusal(self) -> InvalidArgument | None:
        group = self._group
        for arena in group.live_arenas().values():
            if arena.no_suspend:
                return InvalidArgument(f"suspend: {arena.no_suspend}")
        return group.captured("suspend")

    def _unread(self) -> InvalidArgument | None:
        ranks = self._messages.unread() if self._group.arena.nbytes else []  # only the kernels' memory holds messages
        text = (
            f"rank(s) {ranks} have not received all that this rank has sent, and suspend would lose it: receive first"
        )
        return InvalidArgument(text) if ranks else None

    def _require_same_handles(self, what: str) -> None:
        group = self._group
        numbers = [number for number in group.live_arenas() if number]
        said = f"symmetric handles {numbers} open" if numbers else "no symmetric handle open"
        group.control.require_equal(said, what, group.timeout, abort_on_fault=True)

    def _sleep(self, suspended: bool) -> None:
        self._group.sleep(suspended)
        self._faults.monitor.suspended = suspended

    def _give_back(self) -> None:
        failures = []
        for arena in self._group.live_arenas().values():
            try:
                arena.suspend()
            except ResourceError as error:  # the others go all the same
                failures.append(error)
        if failures:
            raise failures[0]

    def _take_again(self) -> None:
        group = self._group
        deadline = Deadline(group.timeout)
        with ExitStack() as undo:
            for arena in group.live_arenas().values():
                arena.resume(group.control, deadline.left)
                undo.callback(_quietly_suspend, arena)
            CollectiveStages(group.control, "resume", deadline)("begin", group.begin)
            undo.pop_all()
        self._sleep(False)

    def _wake_after(self, error: ResourceError) -> None:
        try:
            self._take_again()
        except ResourceError as second:
            raise ResourceError(
                f"{error}; and memory cannot be taken again: {second}. The group is suspended; try resume() later"
            ) from error
        raise ResourceError(f"{error}. The group is not suspended, and its symmetric memory is zeroed") from error


def _quietly_suspend(arena: Arena) -> None:
    try:
        arena.suspend()
    except ResourceError as error:  # another one is being raised
        log.warning("giving memory back after a resume that was refused: %s", error)
