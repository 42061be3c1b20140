"""Which memory more than one block has touched: elsewhere it makes no difference who goes first."""

from __future__ import annotations

import numpy as np

from tricomm.explorer.memory import Array, Place
from tricomm.explorer.tasks import Task

_NOBODY, _MANY = -1, -2


class Contention:
    """Learns over the executions of a campaign. `grew` is True where one of them found more."""

    def __init__(self) -> None:
        self.grew = False
        self._touched: dict[str, Array] = {}

    def contested(self, task: Task, places: list[Place]) -> bool:
        """Note an access; True where another block has made one to the same words, in this execution or before."""
        me, found = task.rank * 64 + task.block, False
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
