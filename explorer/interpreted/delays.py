"""Stores that reach memory late, and tiles that arrive in pieces. A GPU may do both.

A store that releases nothing may reach memory after later actions of its block, but before the block's next access to
the same place, its next release and its end. The elements of one tile are separate stores. Two late stores to the same
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
    """Chooses the stores of an execution that are held back, and for how many steps. The choice is a function of `seed`
    and the store's number."""

    seed: int
    held: list[Held] = field(default_factory=list)
    _stores: int = 0
    _steps: int = 0

    def hold(self, task: Task, access: Access) -> Array | None:
        """The elements of this store to hold back, if any. If an older store has not reached some of the places yet,
        only elements at those places are held back: then other ranks can see new values together with even older
        ones."""
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
        """The delayed stores of a block that must reach memory before its access `access`, which is not held back."""
        if not self.held:
            return []
        releases = access.writes and access.sem in ("release", "acq_rel")
        words = _words(access)

        def must(held: Held) -> bool:
            return held.task is task and (releases or bool(np.isin(_words(held.access, held.lanes), words).any()))

        return self._take(must)

    def _behind(self, task: Task, access: Access) -> Array:
        """True for each element of a store to whose place an older store of the block is still held back."""
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
        """Remove the chosen stores, and the same block's earlier stores to the same places, from those held back;
        return them."""
        taken: list[Held] = []
        for held in reversed(self.held):
            if chosen(held) or any(_same_place(held, other) for other in taken):
                taken.insert(0, held)
        self.held = [h for h in self.held if not any(h is t for t in taken)] if taken else self.held
        return taken


def _same_place(a: Held, b: Held) -> bool:
    return a.task is b.task and bool(np.isin(_words(a.access, a.lanes), _words(b.access, b.lanes)).any())


def _words(access: Access, lanes: Array | None = None) -> Array:
    """Indices of the 8-byte words that an access (or its `lanes`) touches. An element of 16 bytes has two."""
    addresses = access.addresses if lanes is None else access.addresses[lanes]
    first = addresses >> np.uint64(3)
    return first if access.itemsize <= 8 else np.concatenate([first, first + np.uint64(1)])
