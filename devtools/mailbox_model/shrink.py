"""How the survivors of a group agree that they have a smaller one: all have it, or all raise.

Each rank has a word that it alone writes and all read, and all ranks vote on one ballot, on which the first vote
counts. The leader is the lowest survivor. A survivor sets up its part of the new group, writes READY, and waits for the
outcome. It may give up at any time, because its time is up or the set-up has failed; any one rank may die at any time,
and any may be stopped for as long as the others wait. The rules:

    the leader votes for the group once all are READY, and has it if that is the outcome
    a rank that gives up writes WITHDRAWN; after READY it votes against the group, and has it if that is too late

A step reads or writes one word, or votes. A rank that is dead at the end may have had the group: its peers name it at
their next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from devtools.every_order import SAFE, search

HALF, WAITS = "some ranks have the group, others raise", "a rank waits for one that is stopped"
SETTING_UP, READY, WITHDRAWN = range(3)
OPEN, FOR, AGAINST = range(3)
HAS, RAISED, DEAD = "has it", "raised", "dead"
Place = tuple[str, int]  # the step, and the peer that it looks at
State = tuple[tuple[Place, ...], tuple[int, ...], int]


def explore(n: int, broken: str, want: str = SAFE) -> tuple[str, int]:
    """As `every_order.search`, of `n` survivors; `broken`: the rule that is dropped."""
    return search(((("set up", 0),) * n, (SETTING_UP,) * n, OPEN), partial(moves, n, broken), want)


def moves(n: int, broken: str, state: State) -> Iterator[State | str]:
    places, _, _ = state
    for rank, (step, _) in enumerate(places):
        if step in (RAISED, DEAD):
            continue
        if DEAD not in (step for step, _ in places):  # one rank may die, even after it had the group
            yield _with(state, rank, (DEAD, 0))
        if step != HAS:
            after = [*_steps(n, broken, state, rank)]
            yield from after
            if not after:
                yield WAITS
    if {step for step, _ in places if step != DEAD} == {HAS, RAISED}:
        yield HALF


def _steps(n: int, broken: str, state: State, rank: int) -> Iterator[State]:
    places, words, votes = state
    step, peer = places[rank]
    if step == "set up":
        yield _with(state, rank, ("wait", 1 if rank == 0 else 0), READY)
        yield _with(state, rank, (RAISED, 0), WITHDRAWN)
    elif step == "wait":
        if broken != "no time limit" or places[0][0] == DEAD:
            yield _with(state, rank, (RAISED if broken == "no vote" else "vote against", 0), WITHDRAWN)
        if rank == 0:  # looks at one peer after another
            if words[peer] == READY or broken == "unready":
                yield _with(state, 0, ("wait", peer + 1) if peer + 1 < n else ("vote for", 0))
        elif votes == FOR:
            yield _with(state, rank, (HAS, 0))
    else:
        vote = FOR if step == "vote for" else AGAINST
        after = vote if votes == OPEN or broken == "the last vote counts" else votes
        has = vote == FOR if broken == "the outcome is not read" else after == FOR
        yield _with(state, rank, (HAS if has else RAISED, 0), None, after)


def _with(state: State, rank: int, place: Place, word: int | None = None, votes: int | None = None) -> State:
    places, words, before = state
    after = words if word is None else (*words[:rank], word, *words[rank + 1 :])
    return (*places[:rank], place, *places[rank + 1 :]), after, before if votes is None else votes


def cases() -> Iterator[tuple[str, str, Callable[[str], tuple[str, int]]]]:
    """Names, expected verdicts, and explorations, for `every_order.compare`."""
    yield "shrink: 2 survivors", SAFE, partial(explore, 2, "")
    yield "shrink: 3 survivors", SAFE, partial(explore, 3, "")
    for broken, name in {
        "unready": "the leader votes before all are ready",
        "no vote": "a rank that gives up does not vote",
        "the last vote counts": "a later vote changes the outcome",
        "the outcome is not read": "a rank takes its own vote for the outcome",
    }.items():
        yield f"shrink: {name}", HALF, partial(explore, 3, broken)
    yield "shrink: a rank does not give up before the leader has voted", WAITS, partial(explore, 3, "no time limit")
