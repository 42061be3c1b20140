"""Who goes next: the ways to choose among the blocks that can run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from tricomm.explorer.scheduler import default
from tricomm.explorer.tasks import Task

NAMES = ("random", "pct", "exhaustive")


class RandomWalk:
    """At every step any block, with equal chances; the block that ran last is kept with probability `keep`."""

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
    """The choices of a list, (step, task); whoever ran last runs on where the list says nothing that can be done."""

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


@dataclass(slots=True)
class _Fork:
    """A decision of one execution: who was ready, who was taken, and how many preemptions it took to get past it."""

    ready: list[str]
    taken: int
    preempts: bool
    spent: int


class BoundedSearch:
    """Every schedule with at most `preemptions` preemptions, one after another (CHESS; Musuvathi and Qadeer, PLDI'07).

    A block is preempted only before a strong access to memory that another block touches, too: where every execution
    is also examined for races, a switch before a plain access shows nothing that a switch before the next strong one
    does not. Where the running block cannot go on, whoever can is tried, which costs nothing.

        search = BoundedSearch(2)
        while search.begin():
            ... one execution with `search` as its strategy ...
            search.end()
    """

    def __init__(self, preemptions: int) -> None:
        self._most = preemptions
        self._path: list[_Fork] = []
        self._at = 0
        self._over = False

    def begin(self) -> bool:
        """False when every schedule has been seen."""
        self._at = 0
        return not self._over

    def choose(self, step: int, current: Task | None, ready: list[Task]) -> Task:
        first = default(current, ready)
        preempts = current in ready
        if len(ready) == 1 or (preempts and not first.sync):
            return first
        order = [first, *(t for t in ready if t is not first)]
        if self._at < len(self._path):
            fork = self._path[self._at]
            if fork.ready != [t.key for t in order]:
                raise RuntimeError(
                    f"the function does not repeat itself: step {step} has other blocks ready than before"
                )
        else:
            spent = self._path[-1].spent if self._path else 0
            fork = _Fork([t.key for t in order], 0, preempts, spent)
            self._path.append(fork)
        self._at += 1
        return order[fork.taken]

    def end(self) -> None:
        """After an execution: on to the next schedule, the last decision that has another way first."""
        del self._path[self._at :]
        while self._path:
            fork = self._path.pop()
            before = self._path[-1].spent if self._path else 0
            spent = before + (1 if fork.preempts else 0)
            if fork.taken + 1 < len(fork.ready) and spent <= self._most:
                self._path.append(_Fork(fork.ready, fork.taken + 1, fork.preempts, spent))
                return
        self._over = True
