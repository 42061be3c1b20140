"""The choices of a strategy, recorded so that they repeat an execution."""

from __future__ import annotations

from typing import Protocol

from tricomm.explorer.schedule.tasks import Task


class Strategy(Protocol):
    """Chooses the task that runs next."""

    def choose(self, step: int, current: Task | None, ready: list[Task]) -> Task:
        """One of `ready` (in rank and block order, never empty). `current` is the last task; it may be blocked."""


def default(current: Task | None, ready: list[Task]) -> Task:
    """The task that runs without a preemption: the last one, else the next in rank and block order."""
    if current is None or current in ready:
        return ready[0] if current is None else current
    return next((t for t in ready if t.place > current.place), ready[0])


class Choices:
    """`made` are the switches, (step, task). At all other moments the task that ran last continues.

    A strategy is asked several times at one step if the task that it chose is parked or ends before its next step.
    Then `made` also has the answers before a switch at that step, so that a replay does not switch at an earlier
    question.
    """

    def __init__(self) -> None:
        self.made: list[tuple[int, str]] = []
        self._since: list[tuple[int, str]] = []  # answers at the last step, since the last switch

    def note(self, step: int, task: str, switched: bool) -> None:
        self._since = [answer for answer in self._since if answer[0] == step] + [(step, task)]
        if switched:
            self.made += self._since
            self._since = []
