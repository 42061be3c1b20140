"""Shadow memory: the last accesses to every granule of a region, from which unordered accesses are detected.

All in numpy, a whole tile at a time. A granule is the smallest access seen so far (8 bytes at first). No sampling: the
last read of every thread is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Index = slice | Array
SCOPES = {"cta": 1, "gpu": 2, "sys": 3}
PLAIN = 0


@dataclass(slots=True)
class Clash:
    """Two accesses to granule `granule` that nothing orders: an earlier record, and whether it was a write."""

    granule: int
    record: int
    slot: int
    time: int
    written: bool


class Shadow:
    """Of a region of `nbytes` bytes, for `slots` threads. Records are indices into the detector's list of accesses."""

    def __init__(self, nbytes: int, slots: int) -> None:
        self.nbytes, self.slots = nbytes, slots
        self.granule = 8
        n = -(-nbytes // 8)
        self.writer = np.full(n, -1, np.int16)
        self.written = np.zeros(n, np.int32)  # the writer's time
        self.scope = np.zeros(n, np.uint8)  # of the last write, PLAIN if it was a plain one
        self.size = np.zeros(n, np.uint8)
        self.record = np.zeros(n, np.int32)
        self.message = np.full(n, -1, np.int32)
        self.taken = np.ones(n, bool)  # a strong write's value has been read by a strong read
        self.cleared = np.zeros(n, bool)  # the last write cleared an LL word
        self.taker = np.zeros(n, np.int16)
        self.taking = np.zeros(n, np.int32)  # the first taker's time
        self.read = np.zeros((n, slots), np.int32)  # times of the last plain reads
        self.looked = np.zeros((n, slots), np.int32)  # and of the last strong ones
        self.readers = np.zeros((n, slots), np.int32)  # records of the last reads of either kind

    _BY_GRANULE = (
        "writer", "written", "scope", "size", "record", "message", "taken", "cleared", "taker", "taking", "read",
        "looked", "readers",
    )  # fmt: skip

    def index(self, offsets: Array, itemsize: int) -> Index:
        """The granules of the elements at `offsets`; the granules get finer from here on if these are too coarse."""
        if itemsize % self.granule or (offsets % self.granule).any():
            self._refine(next(g for g in (4, 2, 1) if itemsize % g == 0 and not (offsets % g).any()))
        first, width = offsets // self.granule, itemsize // self.granule
        if len(first) > 1:
            step = int(first[1] - first[0])
            if step > 0 and (np.diff(first) == step).all():
                if step == width:
                    return slice(int(first[0]), int(first[-1]) + width)
                if width == 1:
                    return slice(int(first[0]), int(first[-1]) + 1, step)
        elif width:
            return slice(int(first[0]), int(first[0]) + width)
        found = (first[:, None] + np.arange(width)).reshape(-1) if width > 1 else first
        return found

    def _refine(self, granule: int) -> None:
        times = self.granule // granule
        for name in self._BY_GRANULE:
            setattr(self, name, np.repeat(getattr(self, name), times, axis=0))
        self.granule = granule

    def widen(self, slots: int) -> None:
        """Make room for more threads."""
        for name in ("read", "looked", "readers"):
            old = getattr(self, name)
            new = np.zeros((len(old), slots), old.dtype)
            new[:, : self.slots] = old
            setattr(self, name, new)
        self.slots = slots

    def unordered_write(self, index: Index, known: Array) -> Array:
        """bool per granule: the last write does not happen before the clock `known`."""
        return self.written[index] > known[self.writer[index]]

    def clash_with_write(self, index: Index, unordered: Array) -> Clash:
        granule = self._first(index, unordered)
        return Clash(granule, int(self.record[granule]), int(self.writer[granule]), int(self.written[granule]), True)

    def clash_with_read(self, index: Index, known: Array, strong: bool) -> Clash | None:
        """A read (plain, or also strong) that does not happen before the clock `known`."""
        late: Array = self.read[index] > known
        if strong:
            late = late | (self.looked[index] > known)
        if not late.any():
            return None
        row, slot = (int(v[0]) for v in np.nonzero(late))
        granule = self._first(index, np.asarray(late.any(axis=1)))
        time = max(int(self.read[index][row, slot]), int(self.looked[index][row, slot]) if strong else 0)
        return Clash(granule, int(self.readers[granule, slot]), slot, time, False)

    def _first(self, index: Index, which: Array) -> int:
        at = int(np.flatnonzero(which)[0])
        return index.start + at * (index.step or 1) if isinstance(index, slice) else int(index[at])

    def note_read(self, index: Index, slot: int, time: int, record: int, strong: bool) -> None:
        (self.looked if strong else self.read)[index, slot] = time
        self.readers[index, slot] = record

    def note_write(self, index: Index, slot: int, time: int, record: int, scope: int, size: int) -> None:
        self.writer[index], self.written[index] = slot, time
        self.scope[index], self.size[index], self.record[index] = scope, size, record
        self.message[index] = -1
        self.taken[index] = True
        self.cleared[index] = False
        # An access ordered after this write is also ordered after the reads that precede the write.
        self.read[index] = 0
        if scope == PLAIN:
            self.looked[index] = 0

    def take(self, index: Index, slot: int, time: int) -> None:
        """A strong read of the present values."""
        fresh = ~self.taken[index]
        if fresh.any():
            self.taker[index] = np.where(fresh, slot, self.taker[index])
            self.taking[index] = np.where(fresh, time, self.taking[index])
            self.taken[index] = True
