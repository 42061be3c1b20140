"""Tracks the memory that more than one block has accessed. The order of accesses to other memory makes no
difference."""

from __future__ import annotations

import numpy as np

from tricomm.explorer.memory_model.regions import Array, Place
from tricomm.explorer.schedule.bounded_search import BoundedSearch, Touch
from tricomm.explorer.schedule.tasks import Task

_UNTOUCHED, _MANY = -1, -2


class Contention:
    """The contested memory of a campaign's executions. `grew` is True if an execution has shown more of it."""

    def __init__(self, preemptions: int) -> None:
        self.grew = False
        self.search = BoundedSearch(preemptions)
        self._preemptions = preemptions
        self._numbers: dict[str, int] = {}
        self._touched: dict[str, Array] = {}

    def contested(self, task: Task, places: list[Place], itemsize: int = 8) -> bool:
        """Note an access that will be made. True if another block has accessed the same words, in this execution or an
        earlier one."""
        me, contested = self._numbers.setdefault(task.key, len(self._numbers)), False
        for place in places:
            known = self._touched.get(place.region.name)
            if known is None:
                known = self._touched[place.region.name] = np.full(-(-place.region.nbytes // 8), _UNTOUCHED, np.int16)
            words = _words(place, itemsize)
            before = known[words]
            foreign = (before != me) & (before != _UNTOUCHED)
            self.grew |= bool((foreign & (before != _MANY)).any())
            known[words] = np.where(foreign, _MANY, me)
            contested |= bool(foreign.any())
        return contested

    def begin(self) -> bool:
        """Begin the next execution; False if there is none. The search starts over if an execution has shown more
        contested memory."""
        if self.grew:  # so the search has left out decisions
            self.search, self.grew = BoundedSearch(self._preemptions), False
        return self.search.begin()

    def done(
        self, task: Task, places: list[Place], writes: bool, line: object, value: bytes, itemsize: int = 8
    ) -> None:
        """Note an access that has been made."""
        words = frozenset((p.region.name, w) for p in places for w in np.unique(_words(p, itemsize)).tolist())
        self.search.saw(Touch(task.key, words, writes, line, value))

    def host(self) -> None:
        """Note that host code has accessed shared memory."""
        self.search.saw(None)

    def parked(self, task: Task) -> None:
        self.search.parked(task.key)


def _words(place: Place, itemsize: int) -> Array:
    """Indices of the 8-byte words that elements touch in their region. An element of 16 bytes has two."""
    first: Array = place.offsets // 8
    return first if itemsize <= 8 else np.concatenate([first, first + 1])
