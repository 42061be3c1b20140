"""Strategies: ways to choose the next task among the blocks that can run."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from tricomm.explorer.schedule.choices import default
from tricomm.explorer.schedule.tasks import Task

NAMES = ("random", "pct", "exhaustive")


class RandomWalk:
    """At every step a block with uniform probability; the block that ran last is kept with probability `keep`."""

    def __init__(self, seed: int, keep: float = 0.0) -> None:
        self._random, self._keep = Random(seed), keep

    def choose(self, step: int, current: Task | None, ready: list[Task]) -> Task:
        if current in ready and self._random.random() < self._keep:
            assert current is not None
            return current
        return ready[self._random.randrange(len(ready))]


class Priorities:
    """PCT (Burckhardt et al., ASPLOS'10): random priorities, and `depth` - 1 moments at which the highest drops.

    Finds a bug that needs `depth` ordered events with probability at least 1 / (tasks * steps ** (depth - 1)).
    """

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
    """The choices of a list of (step, task). At steps without a possible choice the last task continues."""

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
