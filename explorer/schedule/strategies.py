"""Strategies, which choose the next task among the blocks that can run, and recorded choices, which can be repeated."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Protocol

from tricomm.explorer.schedule.tasks import Task

NAMES = ("random", "pct", "exhaustive")


class Strategy(Protocol):
    """Chooses the task that runs next. With `hosts_first`, ready host code runs first, and it chooses among blocks;
    else it chooses among both."""

    hosts_first: bool

    def choose(self, step: int, current: Task | None, ready: list[Task]) -> Task:
        """Choose one of `ready` (in rank and block order, never empty). `current` is the last task, which may be
        blocked."""


def default(current: Task | None, ready: list[Task]) -> Task:
    """The task that runs without a preemption: the last one, else the next in rank and block order."""
    if current is None or current in ready:
        return ready[0] if current is None else current
    return next((t for t in ready if t.place > current.place), ready[0])


class Choices:
    """The choices of an execution. `made` has the switches, (step, task). At all other moments the last task continues.

    A strategy is asked several times at one step if the chosen task is parked or ends before its next step. Then `made`
    also has the answers before a switch at this step, so that a replay does not switch too early.
    """

    def __init__(self) -> None:
        self.made: list[tuple[int, str]] = []
        self._since: list[tuple[int, str]] = []  # answers at the last step, since the last switch

    def note(self, step: int, task: str, switched: bool) -> None:
        self._since = [answer for answer in self._since if answer[0] == step] + [(step, task)]
        if switched:
            self.made += self._since
            self._since = []


class RandomWalk:
    """Chooses blocks with uniform probability. The last block continues with probability `keep`."""

    def __init__(self, seed: int, keep: float = 0.0, hosts_first: bool = True) -> None:
        self._random, self._keep, self.hosts_first = Random(seed), keep, hosts_first

    def choose(self, step: int, current: Task | None, ready: list[Task]) -> Task:
        if current in ready and self._random.random() < self._keep:
            assert current is not None
            return current
        return ready[self._random.randrange(len(ready))]


class Priorities:
    """PCT (Burckhardt et al., ASPLOS'10): random priorities, and `depth` - 1 moments at which the highest drops.

    An execution shows a bug that needs `depth` ordered events with a probability of at least 1 / (tasks * steps **
    (depth - 1)).
    """

    hosts_first = True

    def __init__(self, seed: int, depth: int, steps: int) -> None:
        self._random = Random(seed)
        self._drops = {self._random.randrange(1, max(2, steps)): -n for n in range(1, depth)}
        self._priority: dict[str, float] = {}

    def choose(self, step: int, current: Task | None, ready: list[Task]) -> Task:
        for task in ready:
            self._priority.setdefault(task.key, self._random.random() + 1)
        best = max(ready, key=self._rank_of)
        if step in self._drops:
            self._priority[best.key] = self._drops.pop(step)
            best = max(ready, key=self._rank_of)
        return best

    def _rank_of(self, task: Task) -> float:
        return self._priority[task.key]


class Given:
    """Repeats a list of choices, (step, task). At steps without a possible choice the last task continues."""

    hosts_first = True

    def __init__(self, choices: Iterable[tuple[int, str]]) -> None:
        self._choices: dict[int, list[str]] = {}
        for step, key in choices:
            self._choices.setdefault(step, []).append(key)

    def choose(self, step: int, current: Task | None, ready: list[Task]) -> Task:
        fallback = default(current, ready)
        wanted = self._choices.get(step)
        if not wanted:
            return fallback
        return next((t for t in ready if t.key == wanted[0] and wanted.pop(0)), fallback)
