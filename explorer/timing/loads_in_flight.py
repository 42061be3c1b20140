"""The bytes that loads have in flight at once."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass
class LoadsInFlight:
    """Loads of one basic block, which overlap. `most` bytes were in flight at once, `total` in all."""

    most: float = 0.0
    total: float = 0.0
    _waited: float = 0.0
    _now: float = 0.0
    _coming: list[tuple[float, float]] = field(default_factory=list)

    def add(self, nbytes: float, now: float, until: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            self._now -= heapq.heappop(self._coming)[1]
        heapq.heappush(self._coming, (until, nbytes))
        self._now += nbytes
        self.most = max(self.most, self._now)
        self.total += nbytes
        self._waited += nbytes * (until - now)

    @property
    def latency(self) -> float:
        """Mean microseconds that a byte is in flight."""
        return self._waited / self.total
