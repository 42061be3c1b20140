"""Stores that reach memory late, and tiles that arrive in pieces: both are allowed on a GPU.

A store that releases nothing may be overtaken by everything that its block does next, except by accesses to the same
place, and by the block's next release or end. The elements of one tile are separate stores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from tricomm.explorer.memory_model.regions import Array, Place
from tricomm.explorer.schedule.tasks import Task
from tricomm.kernels.launch.memory_access import Access

_OFTEN = 0.25
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

    def hold(self, task: Task, access: Access, step: int) -> Array | None:
        """The elements of this store to hold back, if any."""
        if access.kind != "store" or access.sem not in (None, "relaxed"):
            return None
        self._stores += 1
        random = Random(self.seed * 1_000_003 + self._stores)
        if random.random() >= _OFTEN:
            return None
        self._steps = random.randint(1, _LONGEST)
        count = len(access.addresses)
        lanes = np.array([random.random() < 0.5 for _ in range(count)])
        return lanes if lanes.any() else np.ones(count, bool)

    def add(self, held: Held, step: int) -> None:
        held.until = step + self._steps
        self.held.append(held)

    def before(self, task: Task, access: Access) -> list[Held]:
        """The delayed stores that must reach memory before `access` of the same block."""
        if not self.held:
            return []
        releases = access.writes and access.sem in ("release", "acq_rel")
        words = _words(access)

        def must(held: Held) -> bool:
            return held.task is task and (releases or bool(np.isin(_words(held.access), words).any()))

        return self._take(must)

    def due(self, step: int, now: bool) -> list[Held]:
        if not self.held:
            return []
        return self._take(lambda h: now or h.until <= step)

    def _take(self, chosen: Any) -> list[Held]:
        taken = [h for h in self.held if chosen(h)]
        self.held = [h for h in self.held if not chosen(h)]
        return taken


def _words(access: Access) -> Array:
    """Indices of the 8-byte words that an access touches: two for an element of 16 bytes."""
    first = access.addresses >> np.uint64(3)
    return first if access.itemsize <= 8 else np.concatenate([first, first + np.uint64(1)])
