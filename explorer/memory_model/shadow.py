"""Shadow memory: the last accesses to every granule of a region, from which unordered accesses are detected.

All in numpy, a whole tile at a time. A granule is the smallest access seen so far (8 bytes at first). Nothing is
sampled. A kept access is replaced only by a later access that is ordered after it and clashes with everything that the
earlier one would clash with: a plain write, or an access of the same thread and kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricomm.explorer.memory_model.access_kinds import scope_of

Array = NDArray[Any]
Index = slice | Array
SCOPES = {"cta": 1, "gpu": 2, "sys": 3}


@dataclass(slots=True)
class Clash:
    """An earlier access to granule `granule` that is not ordered with the present one: its record, and if it was a
    write."""

    granule: int
    record: int
    slot: int
    time: int
    written: bool


class LastByKind:
    """The last reads, or (`written`) writes, of every granule, by kind (`access_kinds`) and thread."""

    def __init__(self, granules: int, slots: int, written: bool) -> None:
        self._granules, self._slots, self._written = granules, slots, written
        self._bits = np.zeros(granules, np.uint16)  # which kinds a granule has
        # by kind: its bit in `_bits`, and times and records [slot, granule]
        self._tables: dict[int, tuple[int, Array, Array]] = {}

    def note(self, index: Index, slots: Any, times: Any, records: Any, kind: int) -> None:
        """Note one access, or several of one kind at the granules `index`, with values for each."""
        bit, last, noted = self._table(kind)
        early = last[slots, index] > times  # a release's time is before its block's accesses since the last barrier
        if early.any():
            times = np.where(early, last[slots, index], times)
            records = np.where(early, noted[slots, index], records)
        last[slots, index], noted[slots, index] = times, records
        self._bits[index] |= bit

    def forget(self, index: Index) -> None:
        for _, (_, last, _) in self._present(index):
            last[:, index] = 0
        self._bits[index] = 0

    def late(self, index: Index, known: Array, misfits: Callable[[int], Array]) -> Clash | None:
        """An access that does not happen before the clocks `known` (one for all granules, or one for each), made by one
        of the threads that `misfits` returns for its kind."""
        for kind, (_, last, noted) in self._present(index):
            mine = misfits(kind)
            if not mine.any():
                continue
            late = (last[:, index] > known) & mine[:, None]
            if late.any():
                at, slot = (int(v[0]) for v in np.nonzero(late.T))
                granule = int(_granules(index)[at])
                return Clash(granule, int(noted[slot, granule]), slot, int(last[slot, granule]), self._written)
        return None

    def refine(self, times: int) -> None:
        self._granules *= times
        self._bits = np.repeat(self._bits, times)
        for kind, (bit, last, noted) in self._tables.items():
            self._tables[kind] = bit, np.repeat(last, times, axis=1), np.repeat(noted, times, axis=1)

    def widen(self, slots: int) -> None:
        more = ((0, slots - self._slots), (0, 0))
        self._slots = slots
        for kind, (bit, last, noted) in self._tables.items():
            self._tables[kind] = bit, np.pad(last, more), np.pad(noted, more)

    def _present(self, index: Index) -> list[tuple[int, tuple[int, Array, Array]]]:
        bits = int(np.bitwise_or.reduce(self._bits[index])) if self._tables else 0
        return [(kind, table) for kind, table in self._tables.items() if table[0] & bits] if bits else []

    def _table(self, kind: int) -> tuple[int, Array, Array]:
        if kind not in self._tables:
            shape = self._slots, self._granules
            self._tables[kind] = 1 << len(self._tables), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        return self._tables[kind]


class Shadow:
    """The shadow of `nbytes` bytes, for `slots` threads. Records are indices into the detector's list of accesses."""

    def __init__(self, nbytes: int, slots: int) -> None:
        self.nbytes, self.slots = nbytes, slots
        self.granule = 8
        n = -(-nbytes // 8)
        self.writer = np.full(n, -1, np.int16)
        self.written = np.zeros(n, np.int32)  # the writer's time
        self.kind = np.zeros(n, np.uint8)  # of the last write
        self.record = np.zeros(n, np.int32)
        self.message = np.full(n, -1, np.int32)
        self.taken = np.ones(n, bool)  # a strong write's value has been read by a strong read
        self.cleared = np.zeros(n, bool)  # the last write cleared an LL word
        # of a clearing that the last write has replaced: writer, its time, record
        self.zeroed = np.zeros((3, n), np.int32)
        self.taker = np.zeros(n, np.int16)
        self.taking = np.zeros(n, np.int32)  # the first taker's time
        self.reads = LastByKind(n, slots, written=False)
        self.displaced = LastByKind(n, slots, written=True)  # earlier writes that the last one does not replace

    _BY_GRANULE = ("writer", "written", "kind", "record", "message", "taken", "cleared", "zeroed", "taker", "taking")

    def index(self, offsets: Array, itemsize: int) -> Index:
        """The granules of the elements at `offsets`. Granules that are too coarse are split first."""
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
        granules = (first[:, None] + np.arange(width)).reshape(-1) if width > 1 else first
        return granules

    def _refine(self, granule: int) -> None:
        times = self.granule // granule
        for name in self._BY_GRANULE:
            setattr(self, name, np.repeat(getattr(self, name), times, axis=-1))
        for last in (self.reads, self.displaced):
            last.refine(times)
        self.granule = granule

    def widen(self, slots: int) -> None:
        """Make room for more threads."""
        for last in (self.reads, self.displaced):
            last.widen(slots)
        self.slots = slots

    def unordered_write(self, index: Index, known: Array) -> Array:
        """True for each granule whose last write does not happen before the clock `known`."""
        return self.written[index] > known[self.writer[index]]

    def unordered_zero(self, index: Index, known: Array) -> Array:
        """True for each granule whose last write has replaced a clearing that does not happen before the clock
        `known`."""
        writer, written, _ = self.zeroed[:, index]
        late: Array = written > known[writer]
        return late

    def clash_with_write(self, index: Index, unordered: Array) -> Clash:
        granule = int(_granules(index)[unordered][0])
        return Clash(granule, int(self.record[granule]), int(self.writer[granule]), int(self.written[granule]), True)

    def note_write(self, index: Index, slot: int, time: int, record: int, kind: int) -> None:
        if scope_of(kind):
            self._displace(index, slot, time, kind)
        else:
            self.displaced.forget(index)
            self.reads.forget(index)
        if (cleared := self.cleared[index]).any() or self.zeroed[1, index].any():
            self.zeroed[:, index] = cleared * np.stack((self.writer[index], self.written[index], self.record[index]))
        self.writer[index], self.written[index] = slot, time
        self.kind[index], self.record[index] = kind, record
        self.message[index] = -1
        self.taken[index] = True
        self.cleared[index] = False

    def _displace(self, index: Index, slot: int, time: int, kind: int) -> None:
        lost = (self.kind[index] != kind) | (self.writer[index] != slot) | (self.written[index] > time)
        lost &= self.written[index] > 0
        if lost.any():
            at = _granules(index)[lost]
            for other in np.unique(self.kind[at]).tolist():
                of = at[self.kind[at] == other]
                self.displaced.note(of, self.writer[of], self.written[of], self.record[of], other)

    def take(self, index: Index, slot: int, time: int) -> None:
        """Note a strong read of the present values."""
        fresh = ~self.taken[index]
        if fresh.any():
            self.taker[index] = np.where(fresh, slot, self.taker[index])
            self.taking[index] = np.where(fresh, time, self.taking[index])
            self.taken[index] = True


def _granules(index: Index) -> Array:
    return np.arange(index.start, index.stop, index.step) if isinstance(index, slice) else index
