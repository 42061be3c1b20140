"""The last accesses to each piece of a region, and their threads. All in numpy, for all lanes of an instruction at
once.

A piece is the smallest element that was accessed so far.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.compiled.thread_clocks import Array, Clocks, includes
from tricomm.explorer.compiled.thread_epochs import EpochsByKind, UnorderedPair, fence_needed
from tricomm.explorer.compiled.thread_teams import Team
from tricomm.explorer.memory_model.access_kinds import same_size, scope_of


class ThreadShadow:
    """The shadow of a region: the last accesses to its `nbytes` bytes. Message 0 and record 0 stand for none."""

    def __init__(self, nbytes: int, clocks: Clocks, granule: int = 8) -> None:
        self._clocks, self.nbytes, self.granule = clocks, nbytes, granule
        pieces = -(-nbytes // granule)
        self.writer, self.written = np.zeros(pieces, np.int32), np.zeros(pieces, np.int32)
        self.kind, self.record = np.zeros(pieces, np.uint8), np.zeros(pieces, np.int32)
        self.message = np.zeros(pieces, np.int32)
        # True if a strong write has stored the value and nothing has read it yet. For LL words and for leftovers.
        self.waiting = np.zeros(pieces, bool)
        self.cleared = np.zeros(pieces, bool)
        # of a clearing that the last write has replaced: writer, time, kind, record
        self.zeroed = np.zeros((4, pieces), np.int32)
        self.taker, self.taking = np.zeros(pieces, np.int32), np.zeros(pieces, np.int32)
        self.word = np.zeros(pieces, np.int32)  # the `WordRule` vector of the write
        self.plain, self.strong, self.displaced = (EpochsByKind(pieces, clocks) for _ in range(3))

    _BY_PIECE = (
        "writer",
        "written",
        "kind",
        "record",
        "message",
        "waiting",
        "cleared",
        "zeroed",
        "taker",
        "taking",
        "word",
    )

    def pieces(self, offsets: Array, itemsize: int) -> tuple[Array, Array]:
        """The pieces of the elements at `offsets`, and the element number of each piece."""
        if itemsize % self.granule or (offsets % self.granule).any():
            self._refine(next(g for g in (4, 2, 1) if itemsize % g == 0 and not (offsets % g).any()))
        first, each = offsets // self.granule, itemsize // self.granule
        if each == 1:
            return first, np.arange(len(first))
        return (first[:, None] + np.arange(each)).reshape(-1), np.repeat(np.arange(len(first)), each)

    def _refine(self, granule: int) -> None:
        times = self.granule // granule
        for name in self._BY_PIECE:
            setattr(self, name, np.repeat(getattr(self, name), times, axis=-1))
        for epochs in (self.plain, self.strong, self.displaced):
            epochs.refine(times)
        self.granule = granule

    def unordered_write(self, team: Team, pieces: Array, slots: Array, kind: int) -> Array:
        """True for each piece whose last write does not happen before the slot's access, which is of kind `kind`."""
        needed = fence_needed(self._clocks, self.kind[pieces], kind)
        late: Array = self.written[pieces] > self._clocks.known(team, slots, self.writer[pieces], needed)
        return late

    def unordered_zero(self, team: Team, pieces: Array, slots: Array, kind: int) -> Array:
        """True for each piece whose last write has replaced a clearing that does not happen before the slot's
        access."""
        writer, written, kinds, _ = self.zeroed[:, pieces]
        if not written.any():
            return np.zeros(len(pieces), bool)
        needed = fence_needed(self._clocks, kinds, kind)
        late: Array = written > self._clocks.known(team, slots, writer, needed)
        return late

    def clash_with_write(self, team: Team, pieces: Array, slots: Array, at: int) -> UnorderedPair:
        piece = pieces[at]
        slot, time, record, kind = (int(a[piece]) for a in (self.writer, self.written, self.record, self.kind))
        fence_missing = self._clocks.order(team, int(slots[at]), slot, time)
        return UnorderedPair(at, slot, time, record, kind, True, fence_missing)

    def fits(self, kind: int, slots: Array) -> Any:
        """The argument `fits` of `Epochs.late`: which other accesses need no order with a strong access of kind `kind`
        (8.7, morally strong).

        Plain and multicast addresses are not told apart: 8.7 asks for the same proxy, but CUDA's own example polls a
        word by a plain address while others add to it by a multicast address.
        """
        clocks = self._clocks

        def both(kinds: Array, others: Array, mine: Array) -> Array:
            scopes, scope = scope_of(kinds), scope_of(kind)
            far = clocks.rank[others], clocks.block[others]
            near = clocks.rank[mine], clocks.block[mine]
            fit: Array = (
                (scopes > 0)
                & same_size(kinds, kind)
                & includes(scopes, *far, *near)
                & includes(np.full(len(kinds), scope), *near, *far)
            )
            return fit

        return both

    def note_write(
        self, team: Team, pieces: Array, slots: Array, times: Array, record: int, kind: int, equal: Array | None = None
    ) -> None:
        """Note a write. `equal` (bool per piece): the previous write stored the same value, so the next access has to
        be ordered after both."""
        if scope_of(kind):
            lost = self.unordered_write(team, pieces, slots, kind) | (self.kind[pieces] != kind)
            ranks = self._clocks.rank
            lost |= ranks[slots] != ranks[self.writer[pieces]]  # a narrow scope may include only one of the two
            lost &= self.written[pieces] > 0
            if lost.any():
                self._displace(pieces[lost])
        else:
            others = pieces if equal is None else pieces[~equal]
            self.strong.forget(others)
            self.displaced.forget(others)
            if equal is not None and equal.any():
                self._displace(pieces[equal])
        # An access that is ordered after this write is also ordered after all reads before it.
        self.plain.forget(pieces)
        if (cleared := self.cleared[pieces]).any() or self.zeroed[1, pieces].any():
            below = (self.writer[pieces], self.written[pieces], self.kind[pieces], self.record[pieces])
            self.zeroed[:, pieces] = cleared * np.stack(below)
        self.writer[pieces], self.written[pieces] = slots, times
        self.kind[pieces], self.record[pieces], self.message[pieces] = kind, record, 0
        self.waiting[pieces] = self.cleared[pieces] = False

    def _displace(self, pieces: Array) -> None:
        at = np.unique(pieces)
        self.displaced.keep(at, self.writer[at], self.written[at], self.record[at], self.kind[at])
