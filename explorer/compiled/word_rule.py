"""Checks LL words: the reader of a word must have read it and acknowledged it, in a word that the writer has read,
before the word is overwritten.

An LL word needs no order with any other word, so the happens-before clocks do not cover it. The vectors here record
what each block knows of every other block through strong accesses of any kind, ordered or not.
"""

from __future__ import annotations

import numpy as np

from tricomm.explorer.compiled.thread_clocks import Array, distinct
from tricomm.explorer.compiled.thread_shadow import ThreadShadow

_FIRST = 64


class WordRule:
    """Vectors of times by block. Index 0 stands for no block; (rank, -1) is a rank's host code."""

    def __init__(self) -> None:
        self._now = np.zeros((_FIRST, _FIRST), np.int32)
        self._index: dict[tuple[int, int], int] = {}
        self._vectors: list[Array] = [np.zeros(_FIRST, np.int32)]
        self._last: dict[int, int] = {}  # by block: the number of its latest vector, if that is up to date

    def index(self, rank: int, block: int) -> int:
        number = self._index.get((rank, block))
        if number is None:
            number = self._index[rank, block] = len(self._index) + 1
            if number == len(self._now):
                self._now = np.pad(self._now, ((0, number), (0, number)))
            self._now[number, number] = 1
        return number

    # The host

    def row(self, rank: int, block: int = -1) -> Array:
        copy: Array = self._now[self.index(rank, block)].copy()
        return copy

    def learn(self, rank: int, block: int, known: Array) -> None:
        self._join(self.index(rank, block), known)

    # Strong accesses

    def vector(self, rank: int, block: int) -> int:
        """The number of the vector that a strong write by this block passes to its readers."""
        me = self.index(rank, block)
        if me not in self._last:
            self._vectors.append(self._now[me].copy())
            self._last[me] = len(self._vectors) - 1
            self._now[me, me] += 1
        return self._last[me]

    def saw(self, rank: int, block: int, vectors: Array) -> None:
        """A strong read by this block has read words that were written with these vectors."""
        me = self.index(rank, block)
        for number in distinct(vectors):
            if number:
                self._join(me, self._vectors[number])

    def took(self, rank: int, block: int, shadow: ThreadShadow, pieces: Array) -> None:
        """A strong read by this block has read the present values."""
        fresh = pieces[shadow.waiting[pieces]]
        if len(fresh):
            me = self.index(rank, block)
            shadow.taker[fresh], shadow.taking[fresh] = me, self._now[me, me]
            shadow.waiting[fresh] = False
            self._last.pop(me, None)

    def lost(self, rank: int, block: int, shadow: ThreadShadow, pieces: Array) -> tuple[Array, Array]:
        """For words that this block overwrites: (never read, read but perhaps not acknowledged), each a bool per
        piece."""
        now = self._now[self.index(rank, block)]
        never = shadow.waiting[pieces]
        early: Array = shadow.taking[pieces] > now[shadow.taker[pieces]]
        return never, early & ~never

    def _join(self, me: int, known: Array) -> None:
        row = self._now[me, : len(known)]
        if (known > row).any():
            np.maximum(row, known, out=row)
            self._last.pop(me, None)
