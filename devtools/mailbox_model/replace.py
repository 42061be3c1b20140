"""How a new rank learns whether the survivors have the group that it joins.

The survivors decide as in `shrink.py`, over pages that the new rank does not have. In the new group's pages each of
them has a word, which the new rank reads. The rules:

    a survivor marks its word once it has the group; one that raises closes it, as one that leaves the group later does
    the new rank has the group as soon as it reads one mark
    it raises once all words are closed, or of survivors that were dead before it read them

The new rank may itself end or give up at any time: the survivors then have a group with a peer that has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from devtools.every_order import SAFE, search
from devtools.mailbox_model import shrink
from devtools.mailbox_model.shrink import DEAD, HALF, HAS, RAISED, READY

STUCK = "the new rank waits for ever"
MARKED, CLOSED = 1, 2
Reader = tuple[int, int, tuple[bool, ...]]  # the next word to read, open ones so far, who was dead before
State = tuple[shrink.State, tuple[int, ...], str | Reader]


def explore(n: int, broken: str, want: str = SAFE) -> tuple[str, int]:
    """As `every_order.search`, of `n` survivors and a new rank; `broken`: the rule that is dropped."""
    start: shrink.State = (("set up", 0),) * n, (shrink.SETTING_UP,) * n, shrink.OPEN
    whole: State = start, (0,) * n, (0, 0, (False,) * n)
    return search(whole, partial(_moves, n, broken), want)


def _moves(n: int, broken: str, state: State) -> Iterator[State | str]:
    survivors, marks, new = state
    places, words, _ = survivors
    after: list[State] = []
    for moved in shrink.moves(n, "", survivors):
        if isinstance(moved, str):
            yield moved
        else:
            after.append((moved, marks, new))
    for rank, (step, _) in enumerate(places):
        if step == HAS and marks[rank] < CLOSED:  # marks it, and may leave the group at once
            after.append((survivors, _with(marks, rank, marks[rank] + 1), new))
        elif step == RAISED and not marks[rank] and broken != "no close":
            after.append((survivors, _with(marks, rank, CLOSED), new))
        elif broken == "a mark before the decision" and words[rank] == READY and not marks[rank]:
            after.append((survivors, _with(marks, rank, MARKED), new))
    if not isinstance(new, str):
        read = _read(n, broken, survivors, marks, new)
        if not after and new[0] == 0 and isinstance(read, tuple):
            while isinstance(read, tuple) and read[0]:  # all words once more
                read = _read(n, broken, survivors, marks, read)
            if isinstance(read, tuple):
                yield STUCK
        else:
            yield survivors, marks, read
    for (step, _), mark in zip(places, marks, strict=True):
        if (step == HAS and mark < CLOSED and new == RAISED) or (step == RAISED and new == HAS):
            yield HALF
    yield from after


def _read(n: int, broken: str, survivors: shrink.State, marks: tuple[int, ...], new: Reader) -> str | Reader:
    peer, unclosed, dead = new
    if peer == 0:
        dead = tuple(step == DEAD for step, _ in survivors[0])
    if marks[peer] == MARKED:
        return HAS
    closed = marks[peer] == CLOSED or dead[peer]
    if closed and broken == "one closed word is enough":
        return RAISED
    unclosed += not closed
    if peer + 1 < n:
        return peer + 1, unclosed, dead
    return (0, 0, (False,) * n) if unclosed else RAISED


def _with(marks: tuple[int, ...], rank: int, mark: int) -> tuple[int, ...]:
    return (*marks[:rank], mark, *marks[rank + 1 :])


def cases() -> Iterator[tuple[str, str, Callable[[str], tuple[str, int]]]]:
    """As `shrink.cases`."""
    yield "replace: 2 survivors and a new rank", SAFE, partial(explore, 2, "")
    yield "replace: 3 survivors and a new rank", SAFE, partial(explore, 3, "")
    for broken, want, name in (
        ("a mark before the decision", HALF, "a survivor marks its word before the group is decided"),
        ("one closed word is enough", HALF, "the new rank raises at the first closed word"),
        ("no close", STUCK, "a survivor that raises does not close its word"),
    ):
        yield f"replace: {name}", want, partial(explore, 2, broken)
