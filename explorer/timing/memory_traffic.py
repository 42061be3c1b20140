"""The bytes that a warp's accesses move, and the bytes that its loads have in flight at once."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array, ThreadAccess

_SECTOR = 5  # log2 of the bytes of a sector, the smallest transfer


def moved(access: ThreadAccess, chosen: Array | None = None) -> float:
    """The bytes that a warp's access moves: whole sectors of 32 bytes, each counted once."""
    return float(len(granules(access, _SECTOR, chosen)) << _SECTOR)


def granules(access: ThreadAccess, bits: int, chosen: Array | None = None) -> Any:
    """The indices of the aligned pieces of 1 << `bits` bytes that an access touches."""
    addresses = access.addresses if chosen is None else access.addresses[chosen]
    low = int(addresses[0])
    steps = np.diff(addresses)
    if not steps.any():
        return range(low >> bits, ((low + access.width - 1) >> bits) + 1)
    if (steps == access.width).all():
        return range(low >> bits, ((int(addresses[-1]) + access.width - 1) >> bits) + 1)
    return np.unique(addresses >> np.uint64(bits)).tolist()


@dataclass
class LoadsInFlight:
    """The loads of one basic block, which overlap. At most `most` bytes were in flight at once; `total` in all."""

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
        """The mean microseconds for which a byte is in flight."""
        return self._waited / self.total
