"""How the survivors of a group agree that they have a smaller one: all have it, or all raise.

Each rank has a word that it alone writes and all read. The leader is the lowest survivor; it alone decides, by one
store. A survivor sets up its part of the new group, writes READY, and waits for DECIDED. It may give up at any time,
because its time is up or the set-up has failed; any one rank may die at any time. The rules:

    the leader writes PREPARED when all are ready, reads all words again, and decides only if all still are
    a rank that gives up writes WITHDRAWN and then reads the leader's word: at DECIDED it has the group, at PREPARED it
    waits
    the word of a rank that has died counts only if it was read after the death was seen

A step reads or writes one word. A rank that is dead at the end may have had the group: its peers name it at their next
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from devtools.every_order import SAFE, search

HALF, STUCK = "some ranks have the group, others raise", "a rank waits for ever"
SETTING_UP, READY, PREPARED, DECIDED, WITHDRAWN = range(5)
HAS, RAISED, DEAD = "has it", "raised", "dead"
Place = tuple[str, int]  # the step, and the peer that it looks at
State = tuple[tuple[Place, ...], tuple[int, ...]]


def explore(n: int, broken: str, want: str = SAFE) -> tuple[str, int]:
    """As `every_order.search`, of `n` survivors; `broken`: the rule that is dropped."""
    return search(((("set up", 0),) * n, (SETTING_UP,) * n), partial(_moves, n, broken), want)


def _moves(n: int, broken: str, state: State) -> Iterator[State | str]:
    places, words = state
    moved = False
    for rank, (step, _) in enumerate(places):
        if step in (RAISED, DEAD):
            continue
        if DEAD not in (step for step, _ in places):  # one rank may die, even after it had the group
            yield _with(state, rank, (DEAD, 0))
        for after in () if step == HAS else _steps(n, broken, state, rank):
            moved = True
            yield after
    ends = {step for step, _ in places if step != DEAD}
    if ends == {HAS, RAISED}:
        yield HALF
    elif not moved and not ends <= {HAS, RAISED}:
        yield STUCK


def _steps(n: int, broken: str, state: State, rank: int) -> Iterator[State]:
    places, words = state
    step, peer = places[rank]
    dead = [step == DEAD for step, _ in places]
    if step == "set up":
        yield _with(state, rank, ("wait", 1 if rank == 0 else 0), READY)
        yield _with(state, rank, ("give up", 0))
    elif step == "give up":
        yield _with(state, rank, (RAISED, 0) if broken == "no look" or rank == 0 else ("in doubt", 0), WITHDRAWN)
    elif rank == 0:
        yield from _leader(n, broken, state)
    elif step == "wait":
        yield _with(state, rank, ("give up", 0))
        if words[0] == DECIDED:
            yield _with(state, rank, (HAS, 0))
        elif dead[0] and broken != "a dead leader's word is read first":
            yield _with(state, rank, ("give up", 0))
        elif broken == "a dead leader's word is read first":
            yield _with(state, rank, ("is it dead", 0))
    elif step == "is it dead":  # with a word that was read before
        yield _with(state, rank, (RAISED, 0) if dead[0] else ("wait", 0), WITHDRAWN if dead[0] else None)
    elif step == "in doubt":
        if words[0] == DECIDED:
            yield _with(state, rank, (HAS, 0))
        elif words[0] != PREPARED or dead[0] or broken == "no wait in doubt":
            yield _with(state, rank, (RAISED, 0))


def _leader(n: int, broken: str, state: State) -> Iterator[State]:
    places, words = state
    step, peer = places[0]
    here = words[peer] == READY if peer < n else True
    if step == "wait":  # looks at one peer after another
        yield _with(state, 0, ("give up", 0))
        if broken == "unready":
            here = here or words[peer] == SETTING_UP
        if here:
            done = ("decide", 0) if broken == "one look" else ("prepare", 0)
            yield _with(state, 0, ("wait", peer + 1) if peer + 1 < n else done)
    elif step == "prepare":
        yield _with(state, 0, ("look again", 1), PREPARED)
    elif step == "look again":
        if here or broken == "unready":
            yield _with(state, 0, ("look again", peer + 1) if peer + 1 < n else ("decide", 0))
        else:
            yield _with(state, 0, ("give up", 0))
    else:
        yield _with(state, 0, (HAS, 0), DECIDED)


def _with(state: State, rank: int, place: Place, word: int | None = None) -> State:
    places, words = state
    after = words if word is None else (*words[:rank], word, *words[rank + 1 :])
    return (*places[:rank], place, *places[rank + 1 :]), after


def cases() -> Iterator[tuple[str, str, Callable[[str], tuple[str, int]]]]:
    """Names, expected verdicts, and explorations, for `every_order.compare`."""
    yield "shrink: 2 survivors", SAFE, partial(explore, 2, "")
    yield "shrink: 3 survivors", SAFE, partial(explore, 3, "")
    for broken, name in {
        "one look": "the leader decides without a second look",
        "unready": "the leader decides before all are ready",
        "no look": "a rank that gives up does not look at the leader",
        "no wait in doubt": "a rank that gives up does not wait for a leader that prepares",
        "a dead leader's word is read first": "the leader's word is read before its end is seen",
    }.items():
        yield f"shrink: {name}", HALF, partial(explore, 3, broken)
