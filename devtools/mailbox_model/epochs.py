"""The epoch of a call is kept in a word for each block that a launch may have.

Each block reads its word when it begins, and writes the next epoch to it when it ends. The first block also writes the
words of blocks that the launch lacks. No block waits for another block of its rank: one may end before another begins.
In a dependent launch, each block executes its `wait` before it reads its word.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from devtools.mailbox_model.dependent_launches import BEGIN, SIGNAL, WAIT
from devtools.mailbox_model.explore import SAFE, WRONG, Case, Launch, Op, Slot, calls
from devtools.mailbox_model.words_with_flags import merged

MOST = 2  # blocks of a launch


def counted(rank: int, n: int, epoch: int, grid: int, broken: str = "") -> Launch:
    """`merged` with `grid` blocks, a word each, and one chunk. `broken`: the rule that is dropped."""

    def words(*blocks: int) -> tuple[Slot, ...]:
        return tuple((rank, 0, rank, f"n{block}") for block in blocks)

    blocks = merged(rank, n, epoch, chunks=[["ab"[b] for b in range(grid)]])
    for b, ops in enumerate(blocks):
        lacks = b == 0 and broken != "no words of blocks that it lacks"
        kept = [b, *(range(grid, MOST) if lacks else ())]
        if broken == "the first block writes all words":
            kept = [] if b else list(range(MOST))
        read = 0 if broken == "all read the first one's word" else b
        ops[:] = [Op("read", words(read), epoch - 1), *ops, Op("write", words(*kept), epoch)]
    return blocks


def dependent(rank: int, n: int, epoch: int, grid: int, early: bool = False) -> Launch:
    """`counted` as a dependent launch; `early`: a block reads its epoch before the wait."""
    blocks = counted(rank, n, epoch, grid)
    for ops in blocks:
        ops[:] = [BEGIN, *ops[:early], WAIT, SIGNAL, *ops[early:]]
    return blocks


def cases() -> Iterator[Case]:
    for grids in ((2, 2, 2), (1, 2, 1, 2)):
        yield Case(f"epochs by block, grids {grids}", SAFE, calls(2, *[partial(counted, grid=g) for g in grids]))
    for early, want in ((False, SAFE), (True, WRONG)):
        ranks = calls(2, *[partial(dependent, grid=grid, early=early) for grid in (1, 2, 2)])
        yield Case(f"epochs by block, dependent launches{'; read before the wait' * early}", want, ranks)
    for broken, first in (
        ("the first block writes all words", 2),
        ("all read the first one's word", 2),
        ("no words of blocks that it lacks", 1),
    ):
        ranks = calls(2, *[partial(counted, grid=grid, broken=broken) for grid in (first, 2)])
        yield Case(f"epochs by block; {broken}", WRONG, ranks)
