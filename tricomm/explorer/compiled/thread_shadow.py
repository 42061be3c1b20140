"""What was last done to every piece of a region, and by which threads: all in numpy, an instruction's lanes at once.

A piece is the smallest element that was accessed so far. Of reads one epoch is kept as long as each is ordered after
the one before it (FastTrack, PLDI'09); a piece that several threads read unordered gets a row with a time for each
thread, so no read is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tricomm.explorer.compiled.thread_clocks import Array, Clocks, Team, includes

_SIZE = 31  # the low bits of a kind: bytes of the element; above them the scope, 0 for a weak access


def kind_of(scope: int, itemsize: int) -> int:
    return scope << 5 | itemsize


@dataclass(slots=True)
class Clash:
    """Two accesses that nothing orders: element `at` of the later one, and the earlier one's thread, time and record."""

    at: int
    slot: int
    time: int
    record: int
    kind: int
    written: bool


class Epochs:
    """For each piece the last accesses of one sort, none of which is ordered before another one that is kept."""

    def __init__(self, pieces: int, clocks: Clocks) -> None:
        self._clocks, self.used = clocks, False
        self.slot, self.time = np.zeros(pieces, np.int32), np.zeros(pieces, np.int32)
        self.record, self.kind = np.zeros(pieces, np.int32), np.zeros(pieces, np.uint8)
        self.row = np.zeros(pieces, np.int32)
        self._rows = 1
        self._free: list[int] = []
        self._times = np.zeros((1, clocks.size), np.int32)
        self._records, self._kinds = np.zeros((1, clocks.size), np.int32), np.zeros((1, clocks.size), np.uint8)

    def note(self, team: Team, pieces: Array, slots: Array, times: Array, record: Any, kind: Any) -> None:
        """`record` and `kind` are numbers, or arrays of one for each."""
        self.used = True
        record, kind = np.broadcast_to(record, pieces.shape), np.broadcast_to(kind, pieces.shape)
        rows = self.row[pieces]
        wide = rows > 0
        if not wide.all():
            alone = ~wide
            ordered = self.time[pieces] <= self._clocks.known(team, slots, self.slot[pieces])
            if len(pieces) > 1 and not (np.diff(pieces) > 0).all():
                _, inverse, count = np.unique(pieces, return_inverse=True, return_counts=True)
                ordered &= count[inverse] == 1
            alone &= ordered
            at = pieces[alone]
            self.slot[at], self.time[at] = slots[alone], times[alone]
            self.record[at], self.kind[at] = record[alone], kind[alone]
            several = ~wide & ~alone
            if several.any():
                self._spread(np.unique(pieces[several]))
                rows, wide = self.row[pieces], wide | several
        if wide.any():
            at, who = rows[wide], slots[wide]
            self._fit()
            self._times[at, who], self._records[at, who], self._kinds[at, who] = times[wide], record[wide], kind[wide]

    def keep(self, pieces: Array, slots: Array, times: Array, records: Array, kinds: Array) -> None:
        """Accesses of earlier, by any threads; nothing that is kept stands for another."""
        self.used = True
        self._spread(np.unique(pieces[self.row[pieces] == 0]))
        rows = self.row[pieces]
        self._times[rows, slots], self._records[rows, slots], self._kinds[rows, slots] = times, records, kinds

    def forget(self, pieces: Array) -> None:
        if not self.used:
            return
        self.time[pieces] = 0
        rows = self.row[pieces]
        if rows.any():
            for row in np.unique(rows[rows > 0]).tolist():
                self._times[row] = 0
                self._free.append(row)
            self.row[pieces] = 0

    def late(self, team: Team, pieces: Array, slots: Array, fits: Any = None) -> Clash | None:
        """An access that `slots`, at `pieces`, do not know of. `fits(kinds, others, slots)` says which may be so."""
        if not self.used:
            return None
        late = self.time[pieces] > self._clocks.known(team, slots, self.slot[pieces])
        if late.any() and fits is not None:
            late &= ~fits(self.kind[pieces], self.slot[pieces], slots)
        if late.any():
            at = int(np.flatnonzero(late)[0])
            piece = pieces[at]
            values = (int(a[piece]) for a in (self.slot, self.time, self.record, self.kind))
            return Clash(at, *values, written=False)
        rows = self.row[pieces]
        if not rows.any():
            return None
        self._fit()
        which = np.flatnonzero(rows > 0)
        times = self._times[rows[which]]
        unknown = times > self._clocks.known_of_all(team, slots[which])
        if unknown.any() and fits is not None:
            one, other = np.nonzero(unknown)
            unknown[one, other] = ~fits(self._kinds[rows[which[one]], other], other, slots[which[one]])
        if not unknown.any():
            return None
        one, other = (int(v[0]) for v in np.nonzero(unknown))
        row, at = int(rows[which[one]]), int(which[one])
        return Clash(
            at, other, int(times[one, other]), int(self._records[row, other]), int(self._kinds[row, other]), False
        )

    def all_late(self, team: Team, pieces: Array, slots: Array) -> list[Clash]:
        """Every one that the slots do not know of: for loads whose values may never be used."""
        found = []
        late = self.time[pieces] > self._clocks.known(team, slots, self.slot[pieces])
        for at in np.flatnonzero(late & (self.row[pieces] == 0)).tolist():
            values = (int(a[pieces[at]]) for a in (self.slot, self.time, self.record, self.kind))
            found.append(Clash(at, *values, written=False))
        self._fit()
        for at in np.flatnonzero(self.row[pieces]).tolist():
            row = int(self.row[pieces[at]])
            known = self._clocks.known_of_all(team, slots[at : at + 1])[0]
            for other in np.flatnonzero(self._times[row] > known).tolist():
                values = (int(a[row, other]) for a in (self._times, self._records, self._kinds))
                found.append(Clash(at, other, *values, written=False))
        return found

    def refine(self, times: int) -> None:
        for name in ("slot", "time", "record", "kind", "row"):
            setattr(self, name, np.repeat(getattr(self, name), times))
        shared = np.flatnonzero(self.row).reshape(-1, times)
        for pieces in shared:
            source = int(self.row[pieces[0]])
            for piece in pieces[1:].tolist():
                row = self._new_row()
                self.row[piece] = row
                for values in (self._times, self._records, self._kinds):
                    values[row] = values[source]

    def _spread(self, pieces: Array) -> None:
        """Give a row to each of these pieces, which begins with the epoch that is there."""
        self._fit()
        for piece in pieces.tolist():
            row, slot = self._new_row(), self.slot[piece]
            self.row[piece] = row
            self._times[row] = 0
            self._times[row, slot], self._records[row, slot] = self.time[piece], self.record[piece]
            self._kinds[row, slot] = self.kind[piece]
            self.time[piece] = 0

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._rows == len(self._times):
            for name in ("_times", "_records", "_kinds"):
                values = getattr(self, name)
                setattr(self, name, np.concatenate([values, np.zeros((max(8, len(values)), values.shape[1]), values.dtype)]))
        self._rows += 1
        return self._rows - 1

    def _fit(self) -> None:
        """There may be more threads than before."""
        missing = self._clocks.size - self._times.shape[1]
        if missing > 0:
            for name in ("_times", "_records", "_kinds"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, missing))))


class ThreadShadow:
    """Of a region of `nbytes` bytes. Message 0 is none, record 0 is nobody's."""

    def __init__(self, nbytes: int, clocks: Clocks, granule: int = 8) -> None:
        self._clocks, self.nbytes, self.granule = clocks, nbytes, granule
        pieces = -(-nbytes // granule)
        self.writer, self.written = np.zeros(pieces, np.int32), np.zeros(pieces, np.int32)
        self.kind, self.record = np.zeros(pieces, np.uint8), np.zeros(pieces, np.int32)
        self.message = np.zeros(pieces, np.int32)
        # For LL words and leftovers: what is there is a strong write's value, and nobody has read it yet.
        self.waiting = np.zeros(pieces, bool)
        self.cleared = np.zeros(pieces, bool)
        self.taker, self.taking = np.zeros(pieces, np.int32), np.zeros(pieces, np.int32)
        self.word = np.zeros(pieces, np.int32)  # what was seen, by blocks, when it was written
        self.plain, self.strong, self.displaced = (Epochs(pieces, clocks) for _ in range(3))

    _BY_PIECE = ("writer", "written", "kind", "record", "message", "waiting", "cleared", "taker", "taking", "word")

    def pieces(self, offsets: Array, itemsize: int) -> tuple[Array, Array]:
        """The pieces of the elements at `offsets`, and for each the number of its element."""
        if itemsize % self.granule or (offsets % self.granule).any():
            self._refine(next(g for g in (4, 2, 1) if itemsize % g == 0 and not (offsets % g).any()))
        first, each = offsets // self.granule, itemsize // self.granule
        if each == 1:
            return first, np.arange(len(first))
        return (first[:, None] + np.arange(each)).reshape(-1), np.repeat(np.arange(len(first)), each)

    def _refine(self, granule: int) -> None:
        times = self.granule // granule
        for name in self._BY_PIECE:
            setattr(self, name, np.repeat(getattr(self, name), times))
        for epochs in (self.plain, self.strong, self.displaced):
            epochs.refine(times)
        self.granule = granule

    def unordered_write(self, team: Team, pieces: Array, slots: Array) -> Array:
        """bool per piece: its last write is not among what its thread knows."""
        return self.written[pieces] > self._clocks.known(team, slots, self.writer[pieces])

    def clash_with_write(self, pieces: Array, at: int) -> Clash:
        piece = pieces[at]
        values = (int(a[piece]) for a in (self.writer, self.written, self.record, self.kind))
        return Clash(at, *values, written=True)

    def fits(self, kind: int, slots: Array) -> Any:
        """For `Epochs.late`: whether a strong access of that kind may meet others unordered (8.7: morally strong)."""
        clocks = self._clocks

        def both(kinds: Array, others: Array, mine: Array) -> Array:
            scopes, scope = kinds >> 5, kind >> 5
            far = clocks.rank[others], clocks.block[others]
            near = clocks.rank[mine], clocks.block[mine]
            found: Array = (
                (scopes > 0) & ((kinds & _SIZE) == (kind & _SIZE)) & includes(scopes, *far, *near)
                & includes(np.full(len(kinds), scope), *near, *far)
            )  # fmt: skip
            return found

        return both

    def note_write(self, team: Team, pieces: Array, slots: Array, times: Array, record: int, kind: int) -> None:
        if kind >> 5:
            lost = (self.kind[pieces] >> 5 > 0) & self.unordered_write(team, pieces, slots)
            if lost.any():
                at = pieces[lost]
                self.displaced.keep(at, self.writer[at], self.written[at], self.record[at], self.kind[at])
        else:
            self.strong.forget(pieces)
            self.displaced.forget(pieces)
        # Whoever is ordered after this write is ordered after the reads that this write is ordered after.
        self.plain.forget(pieces)
        self.writer[pieces], self.written[pieces] = slots, times
        self.kind[pieces], self.record[pieces], self.message[pieces] = kind, record, 0
        self.waiting[pieces] = self.cleared[pieces] = False
