"""The last accesses of one kind to every piece of a region, by thread.

A piece has one epoch while each access is ordered after the previous one (FastTrack, PLDI'09). If several threads
access a piece without order, all their epochs are kept, so that no access is lost: for a few threads (for example one
of each rank, if all read a shard) in a row of a few entries, otherwise in a row with an entry for each thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tricomm.explorer.compiled.thread_clocks import Array, Clocks
from tricomm.explorer.compiled.thread_teams import Team
from tricomm.explorer.memory_model.access_kinds import MULTICAST, apart, scope_of

_FEW = 8
_COLUMNS = {"slot": np.int32, "time": np.int32, "record": np.int32, "kind": np.uint8}


def fence_needed(clocks: Clocks, kinds: Array, kind: Any) -> Array | None:
    """The argument `apart` of `Clocks.known`: the pairs that need an alias fence. None if no multicast address is in
    use."""
    return apart(kinds, kind) if clocks.switched else None


@dataclass(slots=True)
class UnorderedPair:
    """Two unordered accesses: piece `at` of the later one, and the earlier one's thread, time and record.

    fence_missing   they are ordered, but not through an alias fence
    """

    at: int
    slot: int
    time: int
    record: int
    kind: int
    written: bool
    fence_missing: bool = False


class _Rows:
    """Rows of `width` entries, with columns `slot`, `time`, `record`, `kind`. Time 0 is an empty entry. Row 0 is not
    used."""

    def __init__(self, width: int) -> None:
        self.slot, self.time, self.record, self.kind = (np.zeros((1, width), t) for t in _COLUMNS.values())
        self._rows = 1
        self._free: list[int] = []

    def take(self, count: int) -> Array:
        """Reserve `count` empty rows, and return their numbers."""
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        first, self._rows = self._rows, self._rows + count - len(again)
        if self._rows > len(self.time):
            missing = max(8, self._rows - len(self.time), len(self.time))
            self._pad(((0, missing), (0, 0)))
        return np.array([*again, *range(first, self._rows)], np.int32)

    def give_back(self, rows: Array) -> None:
        self.time[rows] = 0
        self._free += rows.tolist()

    def fit(self, width: int) -> None:
        if width > self.time.shape[1]:
            self._pad(((0, 0), (0, width - self.time.shape[1])))

    def put(self, rows: Array, entries: Array, values: tuple[Any, ...]) -> None:
        for name, value in zip(_COLUMNS, values, strict=True):
            getattr(self, name)[rows, entries] = value

    def copy(self, source: int, rows: Array) -> None:
        for name in _COLUMNS:
            getattr(self, name)[rows] = getattr(self, name)[source]

    def _pad(self, missing: tuple[tuple[int, int], ...]) -> None:
        for name in _COLUMNS:
            setattr(self, name, np.pad(getattr(self, name), missing))


class Epochs:
    """The last accesses of one kind to each piece. No kept access is ordered before another one. A kept access stands
    for the accesses that are ordered before it. So an access that needs no order with it must need none with them
    either (`EpochsByKind`).

    row     by piece: 0 for one epoch, n for row n of the few, -n for row n of those with an entry for each thread
    strong  the accesses have a scope. The narrow scope of a later access may include one rank and not another. Blocks
            of a rank are not told apart
    """

    def __init__(self, pieces: int, clocks: Clocks, strong: bool) -> None:
        self._clocks, self._strong, self.used = clocks, strong, False
        self.slot, self.time = np.zeros(pieces, np.int32), np.zeros(pieces, np.int32)
        self.record, self.kind = np.zeros(pieces, np.int32), np.zeros(pieces, np.uint8)
        self.row = np.zeros(pieces, np.int32)
        self._few, self._all = _Rows(_FEW), _Rows(clocks.size)

    def note(self, team: Team, pieces: Array, slots: Array, times: Array, record: Any, kind: Any) -> None:
        """Note an access. `record` and `kind` are numbers, or arrays with a number for each piece."""
        self.used = True
        if len(pieces) == 1 and not self.row[at := pieces[0]] and (not self.time[at] or self.slot[at] == slots[0]):
            self.slot[pieces], self.time[pieces], self.record[pieces], self.kind[pieces] = slots, times, record, kind
            return
        rows, before = self.row[pieces], self.time[pieces]
        repeated, single = _repeated(pieces), rows == 0
        alone = single & ~repeated
        if before.any():
            alone &= before <= self._clocks.known(team, slots, self.slot[pieces])
            if self._strong:
                ranks = self._clocks.rank
                alone &= (before == 0) | (ranks[slots] == ranks[self.slot[pieces]])
        if alone.all():
            self.slot[pieces], self.time[pieces], self.record[pieces], self.kind[pieces] = slots, times, record, kind
            return
        record, kind = np.broadcast_to(record, pieces.shape), np.broadcast_to(kind, pieces.shape)
        if (rows >= 0).any():
            at = pieces[alone]
            self.slot[at], self.time[at] = slots[alone], times[alone]
            self.record[at], self.kind[at] = record[alone], kind[alone]
            several = single & ~alone
            self._begin_row(pieces[several & ~repeated])
            self._give_all(np.unique(pieces[(several | (rows > 0)) & repeated]))
            self._among_few(pieces, slots, times, record, kind)
            rows = self.row[pieces]
        wide = rows < 0
        if wide.any():
            mine = slots[wide]
            self._all.fit(self._clocks.size)
            self._all.put(-rows[wide], mine, (mine, times[wide], record[wide], kind[wide]))

    def keep(self, pieces: Array, slots: Array, times: Array, records: Array, kinds: Array) -> None:
        """Keep earlier accesses by any threads, one per piece; none replaces another."""
        self.used = True
        empty = (self.row[pieces] == 0) & (self.time[pieces] == 0)
        at = pieces[empty]
        self.slot[at], self.time[at], self.record[at], self.kind[at] = (
            values[empty] for values in (slots, times, records, kinds)
        )
        self._give_all(np.unique(pieces[~empty & (self.row[pieces] >= 0)]))
        pieces, slots, *values = (a[~empty] for a in (pieces, slots, times, records, kinds))
        self._all.put(-self.row[pieces], slots, (slots, *values))

    def forget(self, pieces: Array) -> None:
        if not self.used:
            return
        self.time[pieces] = 0
        rows = self.row[pieces]
        if rows.any():
            self._few.give_back(np.unique(rows[rows > 0]))
            self._all.give_back(np.unique(-rows[rows < 0]))
            self.row[pieces] = 0

    def late(self, team: Team, pieces: Array, slots: Array, kind: int, fits: Any = None) -> UnorderedPair | None:
        """An access to `pieces` that does not happen before `slots`, except those that `fits(kinds, others, slots)`
        exempts."""
        if not self.used:
            return None
        late = self._single_late(team, pieces, slots, kind)
        if late.any() and fits is not None:
            late &= ~fits(self.kind[pieces], self.slot[pieces], slots)
        if late.any():
            at = int(np.flatnonzero(late)[0])
            return self._single(team, pieces, slots, at)
        pairs = self._late_of_rows(team, pieces, slots, kind, fits)
        return min(pairs, key=lambda pair: (pair.at, pair.slot), default=None)

    def all_late(self, team: Team, pieces: Array, slots: Array, kind: int) -> list[UnorderedPair]:
        """All accesses that do not happen before the slots: for loads whose values may never be used."""
        late = self._single_late(team, pieces, slots, kind)
        pairs = [self._single(team, pieces, slots, at) for at in np.flatnonzero(late).tolist()]
        return pairs + sorted(self._late_of_rows(team, pieces, slots, kind), key=lambda pair: (pair.at, pair.slot))

    def refine(self, times: int) -> None:
        for name in ("slot", "time", "record", "kind", "row"):
            setattr(self, name, np.repeat(getattr(self, name), times))
        for pieces in np.flatnonzero(self.row).reshape(-1, times):
            row = int(self.row[pieces[0]])
            table, sign = (self._few, 1) if row > 0 else (self._all, -1)
            more = table.take(times - 1)
            table.copy(abs(row), more)
            self.row[pieces[1:]] = sign * more

    def _single_late(self, team: Team, pieces: Array, slots: Array, kind: int) -> Array:
        needed = fence_needed(self._clocks, self.kind[pieces], kind)
        known = self._clocks.known(team, slots, self.slot[pieces], needed)
        late: Array = self.time[pieces] > known
        return late

    def _single(self, team: Team, pieces: Array, slots: Array, at: int) -> UnorderedPair:
        values = (int(a[pieces[at]]) for a in (self.slot, self.time, self.record, self.kind))
        return self._pair(team, int(slots[at]), at, *values)

    def _pair(self, team: Team, mine: int, at: int, slot: int, time: int, record: int, kind: int) -> UnorderedPair:
        return UnorderedPair(at, slot, time, record, kind, False, self._clocks.order(team, mine, slot, time))

    def _late_of_rows(
        self, team: Team, pieces: Array, slots: Array, kind: int, fits: Any = None
    ) -> list[UnorderedPair]:
        rows = self.row[pieces]
        if not rows.any():
            return []
        pairs = []
        for table, numbers in ((self._few, rows), (self._all, -rows)):
            which = np.flatnonzero(numbers > 0)
            if not len(which):
                continue
            mine = numbers[which]
            if table is self._all:
                table.fit(self._clocks.size)
                needed = fence_needed(self._clocks, table.kind[mine], kind)
                known = self._clocks.known_of_all(team, slots[which], needed)
            else:
                others = table.slot[mine].reshape(-1)
                needed = fence_needed(self._clocks, table.kind[mine].reshape(-1), kind)
                known = self._clocks.known(team, np.repeat(slots[which], _FEW), others, needed).reshape(-1, _FEW)
            one, other = np.nonzero(table.time[mine] > known)
            if len(one) and fits is not None:
                unfit = ~fits(table.kind[mine[one], other], table.slot[mine[one], other], slots[which[one]])
                one, other = one[unfit], other[unfit]
            for n, entry in zip(one.tolist(), other.tolist(), strict=True):
                values = (int(getattr(table, name)[mine[n], entry]) for name in _COLUMNS)
                pairs.append(self._pair(team, int(slots[which[n]]), int(which[n]), *values))
        return pairs

    def _begin_row(self, pieces: Array) -> None:
        """Give each of these pieces a row for few threads, which begins with its present epoch."""
        if len(pieces):
            rows = self._few.take(len(pieces))
            self._move_single(self._few, rows, np.zeros(len(rows), np.int64), pieces)
            self.row[pieces] = rows

    def _among_few(self, pieces: Array, slots: Array, times: Array, record: Array, kind: Array) -> None:
        """Enter the accesses whose piece has a row for few threads: into the thread's entry, or an empty one. If there
        is neither, the piece gets a row with an entry for each thread."""
        which = np.flatnonzero(self.row[pieces] > 0)
        if not len(which):
            return
        rows, mine = self.row[pieces[which]], slots[which]
        empty = self._few.time[rows] == 0
        own = ~empty & (self._few.slot[rows] == mine[:, None])
        entries = np.where(own.any(axis=1), own.argmax(axis=1), empty.argmax(axis=1))
        fit = (own | empty).any(axis=1)
        self._give_all(pieces[which[~fit]])
        which, rows, entries = which[fit], rows[fit], entries[fit]
        self._few.put(rows, entries, (slots[which], times[which], record[which], kind[which]))

    def _give_all(self, pieces: Array) -> None:
        """Give each of these pieces a row with an entry for each thread, which begins with its present epochs."""
        self._all.fit(self._clocks.size)
        if not len(pieces):
            return
        rows, before = self._all.take(len(pieces)), self.row[pieces]
        single, few = before == 0, np.flatnonzero(before > 0)
        self._move_single(self._all, rows[single], self.slot[pieces[single]], pieces[single])
        one, entry = np.nonzero(self._few.time[before[few]])
        values = tuple(getattr(self._few, name)[before[few[one]], entry] for name in _COLUMNS)
        self._all.put(rows[few[one]], values[0], values)
        self._few.give_back(before[few])
        self.row[pieces] = -rows

    def _move_single(self, table: _Rows, rows: Array, entries: Array, pieces: Array) -> None:
        table.put(rows, entries, (self.slot[pieces], self.time[pieces], self.record[pieces], self.kind[pieces]))
        self.time[pieces] = 0


class EpochsByKind:
    """`Epochs` for each group of accesses that may stand for each other: all weak ones by plain addresses, all weak
    ones by multicast addresses, and strong ones of a rank, of one scope, size and kind of address. Scopes are separate,
    because an access may need no order with one of wide scope, but with an earlier one of narrow scope."""

    def __init__(self, pieces: int, clocks: Clocks) -> None:
        self._pieces, self._clocks = pieces, clocks
        self._of_kind: dict[int, Epochs] = {}

    @property
    def used(self) -> bool:
        return bool(self._of_kind)

    def note(self, team: Team, pieces: Array, slots: Array, times: Array, record: int, kind: int) -> None:
        self._for(kind).note(team, pieces, slots, times, record, kind)

    def keep(self, pieces: Array, slots: Array, times: Array, records: Array, kinds: Array) -> None:
        for kind in np.unique(kinds).tolist():
            mine = kinds == kind
            self._for(kind).keep(pieces[mine], slots[mine], times[mine], records[mine], kinds[mine])

    def forget(self, pieces: Array) -> None:
        for epochs in self._of_kind.values():
            epochs.forget(pieces)

    def late(self, team: Team, pieces: Array, slots: Array, kind: int, fits: Any = None) -> UnorderedPair | None:
        pairs = (epochs.late(team, pieces, slots, kind, fits) for epochs in self._of_kind.values())
        return next((pair for pair in pairs if pair is not None), None)

    def all_late(self, team: Team, pieces: Array, slots: Array, kind: int) -> list[UnorderedPair]:
        return [pair for epochs in self._of_kind.values() for pair in epochs.all_late(team, pieces, slots, kind)]

    def refine(self, times: int) -> None:
        self._pieces *= times
        for epochs in self._of_kind.values():
            epochs.refine(times)

    def _for(self, kind: int) -> Epochs:
        number = kind if scope_of(kind) else kind & MULTICAST
        if number not in self._of_kind:
            self._of_kind[number] = Epochs(self._pieces, self._clocks, scope_of(kind) > 0)
        return self._of_kind[number]


def _repeated(pieces: Array) -> Array:
    """bool by access: another one is to the same piece."""
    if len(pieces) == 1 or (np.diff(pieces) > 0).all():
        return np.zeros(len(pieces), bool)
    if (pieces == pieces[0]).all():
        return np.ones(len(pieces), bool)
    _, inverse, count = np.unique(pieces, return_inverse=True, return_counts=True)
    repeated: Array = count[inverse] > 1
    return repeated
