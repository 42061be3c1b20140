"""Which memory more than one block has touched: elsewhere it makes no difference who goes first."""

from __future__ import annotations

import numpy as np

from tricomm.explorer.memory_model.regions import Array, Place
from tricomm.explorer.schedule.bounded_search import BoundedSearch, Touch
from tricomm.explorer.schedule.tasks import Task

_NOBODY, _MANY = -1, -2


class Contention:
    """Learns over the executions of a campaign, whose search is told. `grew` is True where it found more to search."""

    def __init__(self, preemptions: int) -> None:
        self.grew = False
        self.search = BoundedSearch(preemptions)
        self._preemptions = preemptions
        self._numbers: dict[str, int] = {}
        self._touched: dict[str, Array] = {}

    def contested(self, task: Task, places: list[Place]) -> bool:
        """Note an access; True where another block has made one to the same words, in this execution or before."""
        me, found = self._numbers.setdefault(task.key, len(self._numbers)), False
        for place in places:
            known = self._touched.get(place.region.name)
            if known is None:
                known = self._touched[place.region.name] = np.full(-(-place.region.nbytes // 8), _NOBODY, np.int16)
            words = place.offsets // 8
            before = known[words]
            foreign = (before != me) & (before != _NOBODY)
            self.grew |= bool((foreign & (before != _MANY)).any())
            known[words] = np.where(foreign, _MANY, me)
            found |= bool(foreign.any())
        return found

    def begin(self) -> bool:
        """On to the next execution; False when there is none. From the start again where one has found more."""
        if self.grew:  # decisions were passed by where there was one to make
            self.search, self.grew = BoundedSearch(self._preemptions), False
        return self.search.begin()

    def done(self, task: Task, places: list[Place], writes: bool, line: object, value: bytes) -> None:
        """An access has been done."""
        words = frozenset((p.region.name, w) for p in places for w in np.unique(p.offsets // 8).tolist())
        self.search.saw(Touch(task.key, words, writes, line, value))

    def host(self) -> None:
        """Host code has touched shared memory."""
        self.search.saw(None)

    def parked(self, task: Task) -> None:
        self.search.parked(task.key)
