"""Rows of a few epochs and rows of all threads keep the same accesses as a list of every thread's last one."""

import numpy as np
import pytest

from tricomm.explorer.compiled.thread_clocks import Clocks
from tricomm.explorer.compiled.thread_epochs import Epochs

THREADS, PIECES = 24, 6


class Model:
    """Each thread's last access, by piece; `single` pieces keep one access while each is ordered after the last."""

    def __init__(self, known):
        self.known = known
        self.accesses = [{} for _ in range(PIECES)]
        self.single = [True] * PIECES

    def note(self, pieces, slots, times, record, kind):
        for piece in np.unique(pieces):
            mine = [(int(s), int(t)) for p, s, t in zip(pieces, slots, times, strict=True) if p == piece]
            ordered = all(t <= self.known[mine[0][0], s] for s, (t, _, _) in self.accesses[piece].items())
            self.single[piece] &= len(mine) == 1 and ordered
            if self.single[piece]:
                self.accesses[piece].clear()
            self.accesses[piece].update({s: (t, record, kind) for s, t in mine})

    def forget(self, pieces):
        for piece in pieces:
            self.accesses[piece], self.single[piece] = {}, True

    def late(self, pieces, slots):
        return [
            (at, s, *values)
            for at, (piece, slot) in enumerate(zip(pieces, slots, strict=True))
            for s, values in sorted(self.accesses[piece].items())
            if values[0] > self.known[slot, s]
        ]


@pytest.mark.parametrize("seed", range(6))
def test_every_unexamined_access_is_listed(seed):
    random = np.random.default_rng(seed)
    clocks = Clocks()
    team = clocks.team(0, THREADS)
    known = np.zeros((clocks.size, clocks.size), np.int32)
    clocks.known = lambda team, slots, others, apart=None: known[slots, others]
    clocks.known_of_all = lambda team, slots, apart=None: known[slots]
    epochs, model = Epochs(PIECES, clocks, False), Model(known)
    readers = team.slots[: (3, THREADS)[seed % 2]]  # few threads, or more than a row for a few has entries
    for time in range(1, 60):
        count = int(random.integers(1, 9))
        pieces, slots = random.integers(0, PIECES, count), random.choice(readers, count)
        if random.random() < 0.3:
            pieces = np.sort(random.choice(PIECES, min(count, PIECES), replace=False))
            slots = slots[: len(pieces)]
        results = [(u.at, u.slot, u.time, u.record, u.kind) for u in epochs.all_late(team, pieces, slots, 4)]
        expected = model.late(pieces, slots)
        assert sorted(results) == expected
        first = epochs.late(team, pieces, slots, 4)
        assert (first is None) == (not expected)
        pairs = sorted(set(zip(pieces.tolist(), slots.tolist(), strict=True)))  # a thread's lanes are one access
        pieces, slots = (np.array(column) for column in zip(*pairs, strict=True))
        epochs.note(team, pieces, slots, np.full(len(pieces), time, np.int32), time, time % 64)
        model.note(pieces, slots, [time] * len(pieces), time, time % 64)
        if random.random() < 0.15:
            gone = random.choice(PIECES, 2, replace=False)
            epochs.forget(gone)
            model.forget(gone)
        known[random.choice(readers), random.choice(readers)] = time


def test_pieces_that_are_divided_keep_all_epochs_and_one_no_longer_changes_the_other():
    clocks = Clocks()
    team = clocks.team(0, THREADS)
    for threads in (2, THREADS):
        epochs = Epochs(1, clocks, False)
        for slot in team.slots[:threads]:
            epochs.note(team, np.array([0]), np.array([slot]), np.array([1], np.int32), int(slot), 4)
        epochs.refine(2)
        writer = team.slots[threads - 1]
        others = [int(slot) for slot in team.slots[: threads - 1]]
        for piece in (1, 0):
            late = epochs.all_late(team, np.array([piece]), np.array([writer]), 4)
            assert [pair.record for pair in late] == others
            epochs.forget(np.array([piece]))
            assert epochs.late(team, np.array([piece]), np.array([writer]), 4) is None
