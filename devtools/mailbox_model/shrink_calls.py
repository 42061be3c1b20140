"""How calls of shrink meet: one death makes each survivor's call fail once at most, and their next calls meet.

Two survivors call until they have a group; rank 0 invites. A third rank dies at any time. In the case "named" the
survivors leave out the ranks that they name, and the third one only after a call has told them that it died; else they
leave out those that have ended, and the third one, alive, is invited and dies before it is ready. The rules:

    a rank begins its next call when its peer has left the call that failed with its own
    a call that names too few ranks to succeed, because another has died, does not count for a peer that knows of the
    death; so a rank does not wait for it after it has made such a call
    a rank looks for a death after it has read its peer's page, and names it before any difference

A step reads or writes one page, or looks whether the third rank has died. `shrink` is about what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from devtools.every_order import SAFE, search

AGAIN, DIFFER = "one death makes two calls of a rank fail", "ranks that know of one death differ"
STUCK = "a rank waits for ever"
WITHDRAWN, PROPOSED, INVITED, ACCEPTED, DECIDED = range(5)


@dataclass(frozen=True)
class Page:
    """A rank's call: its number, its phase, whether it leaves out the third rank, and how many of the peer's calls were
    over when it began. As rank 0 invites: the number of the peer's call, and whether the third rank is invited."""

    number: int = 0
    phase: int = WITHDRAWN
    without: bool = False
    over: int = 0
    invited: int = 0
    third: bool = False


@dataclass(frozen=True)
class Rank:
    """A survivor.

    step   that comes next
    page   of this rank
    over   the number of the peer's calls that were over when this rank began its next one
    read   the peer's page as this rank has read it
    seen   it has seen the death in this call
    knows  it knows of the death from an earlier call
    failed the number of its calls that have failed
    """

    step: str = "begin"
    page: Page = Page()
    over: int = 0
    read: Page = Page()
    seen: bool = False
    knows: bool = False
    failed: int = 0


State = tuple[tuple[Rank, Rank], bool]  # whether the third rank is dead


def explore(named: bool, broken: str, want: str = SAFE) -> tuple[str, int]:
    """As `every_order.search`; `broken`: the rule that is dropped."""
    edges: dict[State, list[State | str]] = {}

    def moves(state: State) -> list[State | str]:
        edges[state] = [*_moves(named, broken, state)]
        return edges[state]

    verdict, states = search(((Rank(), Rank()), False), moves, want)
    if verdict == SAFE and not _all_can_end(edges):
        verdict = STUCK
    return verdict, states


def _all_can_end(edges: dict[State, list[State | str]]) -> bool:
    """Whether both ranks can have a group, whatever has happened so far."""
    ends = {state for state in edges if all(rank.step == "has it" for rank in state[0])}
    before = -1
    while len(ends) > before:
        before = len(ends)
        ends |= {state for state, after in edges.items() if not ends.isdisjoint(after)}
    return len(ends) == len(edges)


def _moves(named: bool, broken: str, state: State) -> Iterator[State | str]:
    ranks, dead = state
    if not dead:
        yield ranks, True
    for me in range(2):
        for after in _steps(named, broken, me, ranks[me], ranks[1 - me].page, dead):
            if isinstance(after, str):
                yield after
            else:
                yield ((after, ranks[1]) if me == 0 else (ranks[0], after)), dead


def _steps(named: bool, broken: str, me: int, rank: Rank, theirs: Page, dead: bool) -> Iterator[Rank | str]:
    mine = rank.page
    if rank.step == "begin":
        standing = theirs.phase in (PROPOSED, INVITED, ACCEPTED) and theirs.over < mine.number
        hopeless = named and dead and not mine.without and broken != "wait after a call without hope"
        if not standing or hopeless or broken == "no wait for the last call":
            yield replace(rank, step="post", over=theirs.number - (theirs.phase != WITHDRAWN))
    elif rank.step == "post":
        page = Page(mine.number + 1, PROPOSED, named and rank.knows, rank.over)
        yield replace(rank, step="look", page=page, over=0)
    elif rank.step in ("look", "meet"):  # before it reads its peer's page
        yield replace(rank, step="read" if rank.step == "look" else "meet, read", seen=dead)
    elif rank.step == "read":
        yield replace(rank, step="agree", read=theirs)
    elif rank.step == "agree":
        seen = rank.seen if broken == "no look after the page is read" or not named else dead
        yield from _agree(named, broken, me, replace(rank, read=Page(), seen=seen), rank.read)
    elif rank.step == "meet, read":
        yield from _set_up(me, rank, theirs)
    elif rank.step == "fail":  # a call that its peer's failed one was meant to meet is no match of the peer's next one
        over = mine.over
        if theirs.phase == WITHDRAWN and theirs.number and theirs.over == mine.number - 1:
            over = min(over, theirs.number - 1)
        yield replace(rank, step="begin", page=replace(mine, phase=WITHDRAWN, over=over))


def _agree(named: bool, broken: str, me: int, rank: Rank, theirs: Page) -> Iterator[Rank | str]:
    mine, again = rank.page, replace(rank, step="look", seen=False)
    differ = named and mine.without != theirs.without and theirs.number > 0 and theirs.phase != WITHDRAWN
    if named and rank.seen and not mine.without and not (differ and broken == "no death first"):
        yield _fail(rank)
    elif theirs.number == 0:
        yield again
    elif named and rank.seen and not theirs.without and broken != "a call without hope counts":
        yield again
    elif theirs.phase == DECIDED:
        yield again
    elif theirs.phase == WITHDRAWN:
        failed = theirs.over == mine.number - 1 or theirs.number > mine.over
        yield _fail(rank) if failed else again
    elif differ:
        yield DIFFER
    elif me == 0:
        third = not named and not rank.seen
        page = replace(mine, phase=INVITED, invited=theirs.number, third=third)
        yield replace(rank, step="meet", page=page)
    elif theirs.phase == INVITED and theirs.invited == mine.number and theirs.third == (not named and not rank.seen):
        page = replace(mine, phase=ACCEPTED, invited=theirs.number, third=theirs.third)
        yield replace(rank, step="meet", page=page)
    else:
        yield again


def _set_up(me: int, rank: Rank, theirs: Page) -> Iterator[Rank | str]:
    mine = rank.page
    if theirs.number != mine.invited or theirs.phase == WITHDRAWN or (mine.third and rank.seen):
        yield _fail(rank)
    elif not mine.third and theirs.phase == (ACCEPTED if me == 0 else DECIDED):
        yield replace(rank, step="has it", page=replace(mine, phase=DECIDED))
    else:
        yield replace(rank, step="meet", seen=False)


def _fail(rank: Rank) -> Rank | str:
    return AGAIN if rank.failed else replace(rank, step="fail", seen=False, knows=True, failed=1)


def cases() -> Iterator[tuple[str, str, Callable[[str], tuple[str, int]]]]:
    """Names, expected verdicts, and explorations, for `every_order.compare`."""
    yield "shrink again: ranks that are named", SAFE, partial(explore, True, "")
    yield "shrink again: ranks that have ended", SAFE, partial(explore, False, "")
    for named, broken, want, name in (
        (True, "wait after a call without hope", STUCK, "a rank waits for a peer that ignores its failed call"),
        (False, "no wait for the last call", AGAIN, "a call begins before the failed ones are over"),
        (True, "a call without hope counts", AGAIN, "a call that cannot succeed stands"),
        (True, "no look after the page is read", DIFFER, "a rank looks for a death before it reads its peer's page"),
        (True, "no death first", DIFFER, "a rank says that its peer differs before it names a death"),
    ):
        yield f"shrink again: {name}", want, partial(explore, named, broken)
