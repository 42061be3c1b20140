"""Suspends a communicator: frees its memory, and reserves its addresses for the graphs captured over them.

    awake ── suspend: no call in flight on any rank, all free their memory ──▶ asleep
    asleep ── resume: new memory, zeroed, at the same addresses, initialised as at first ──▶ awake

Both are collective, in stages: after each of them all ranks go on, or none. A suspend that is refused leaves the group
awake, a resume that is refused leaves it asleep. The monitor continues, because the control page stays.
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
from tricomm.store.arenas.arena import Arena
from tricomm.store.collective_stages import CollectiveStages

log = logging.getLogger("tricomm")


class Suspension:
    """Suspends and resumes one group."""

    def __init__(self, group: Group, faults: Faults, launcher: Launcher, messages: PointToPoint) -> None:
        self._group, self._faults, self._launcher, self._messages = group, faults, launcher, messages

    def suspend(self) -> None:
        """As `Communicator.suspend`."""
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
        """As `Communicator.resume`."""
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
