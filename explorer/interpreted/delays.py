"""Stores that reach memory late, and tiles that arrive in pieces: both are allowed on a GPU.

A store that releases nothing may be overtaken by everything that its block does next, except by accesses to the same
place, and by the block's next release or end. The elements of one tile are separate stores. Two late stores to one
place arrive in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from tricomm.explorer.memory_model.regions import Array, Place
from tricomm.explorer.schedule.tasks import Task
from tricomm.kernels.launch.memory_access import Access

_OFTEN, _OFTEN_BEHIND = 0.25, 0.5
_LONGEST = 40


@dataclass(slots=True)
class Held:
    """The elements `lanes` of a store that have not reached memory yet."""

    task: Task
    access: Access
    places: list[Place]
    lanes: Array
    stamp: Any
    until: int = 0


@dataclass
class Delays:
    """Which stores of an execution are held, and for how many steps: a function of `seed` and the store's number."""

    seed: int
    held: list[Held] = field(default_factory=list)
    _stores: int = 0
    _steps: int = 0

    def hold(self, task: Task, access: Access) -> Array | None:
        """The elements of this store to hold back, if any. If an older store has not reached some of their places yet,
        these elements alone: then what was there before can be seen among the others."""
        if access.kind != "store" or access.sem not in (None, "relaxed"):
            return None
        self._stores += 1
        random = Random(self.seed * 1_000_003 + self._stores)
        behind = self._behind(task, access)
        if random.random() >= (_OFTEN_BEHIND if behind.any() else _OFTEN):
            return None
        self._steps = random.randint(1, _LONGEST)
        if behind.any():
            return behind
        count = len(access.addresses)
        lanes = np.array([random.random() < 0.5 for _ in range(count)])
        return lanes if lanes.any() else np.ones(count, bool)

    def add(self, held: Held, step: int) -> None:
        held.until = step + self._steps
        if self._behind(held.task, held.access).any():
            held.until = max(held.until, *(other.until for other in self.held if other.task is held.task))
        self.held.append(held)

    def before(self, task: Task, access: Access) -> list[Held]:
        """The delayed stores that must reach memory before `access` of the same block, which is not held back."""
        if not self.held:
            return []
        releases = access.writes and access.sem in ("release", "acq_rel")
        words = _words(access)

        def must(held: Held) -> bool:
            return held.task is task and (releases or bool(np.isin(_words(held.access, held.lanes), words).any()))

        return self._take(must)

    def _behind(self, task: Task, access: Access) -> Array:
        """Which elements of a store have a place that an older store of the block has not reached yet."""
        behind = np.zeros(len(access.addresses), bool)
        for held in self.held:
            if held.task is task:
                words = _words(held.access, held.lanes)
                behind |= np.isin(_words(access), words).reshape(-1, len(behind)).any(axis=0)
        return behind

    def due(self, step: int, now: bool) -> list[Held]:
        if not self.held:
            return []
        return self._take(lambda h: now or h.until <= step)

    def _take(self, chosen: Any) -> list[Held]:
        """Those that are chosen, and what the same block has stored to the same places before."""
        taken: list[Held] = []
        for held in reversed(self.held):
            if chosen(held) or any(_same_place(held, other) for other in taken):
                taken.insert(0, held)
        self.held = [h for h in self.held if not any(h is t for t in taken)] if taken else self.held
        return taken


def _same_place(a: Held, b: Held) -> bool:
    return a.task is b.task and bool(np.isin(_words(a.access, a.lanes), _words(b.access, b.lanes)).any())


def _words(access: Access, lanes: Array | None = None) -> Array:
    """Indices of the 8-byte words that an access touches, or those `lanes` of it: two for an element of 16 bytes."""
    addresses = access.addresses if lanes is None else access.addresses[lanes]
    first = addresses >> np.uint64(3)
    return first if access.itemsize <= 8 else np.concatenate([first, first + np.uint64(1)])
