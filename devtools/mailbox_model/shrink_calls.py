"""How calls of shrink meet: an error fails one call of each rank at most, and their next calls meet.

Two survivors call until they have a group; rank 0 invites. A third rank dies at any time, and a survivor may give up at
any time: its call is refused before it is shown, or its time is up. A survivor that names ranks leaves out the third
one only after a call of it has failed; another one leaves out those that have ended. While both have the third one in
their group, they invite it, and it dies before it is ready. The rules:

    the calls that meet are one attempt, which has a number; a call that fails shows its error and its attempt's number
    a rank hears an error of the attempt that its call belongs to, or of a later one, and no earlier one
    the attempt of a rank's next call is later than all those of errors that are shown when its call fails
    a call joins its peer's attempt if that is later, before it is shown and while it waits
    a call that names too few ranks to succeed, because another has died, shows no error, and its peer passes over it
    a rank looks for a death after it has read its peer's page, and names it before any difference

A step reads or writes one page, or looks whether the third rank has died. `shrink` is about what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from devtools.every_order import SAFE, search

AGAIN, DIFFER = "an error fails two calls of a rank", "ranks that know of one death differ"
STUCK = "a rank waits for ever"
WITHDRAWN, PROPOSED, INVITED, ACCEPTED, DECIDED = range(5)
DEATH = "death"


@dataclass(frozen=True)
class Page:
    """A rank's call: its number, its phase, its attempt, and whether it leaves out the third rank. Of the latest call
    that failed: the error, and the attempt that this has failed; 0 for none. As rank 0 invites: the number of the
    peer's call, and whether the third rank is invited."""

    number: int = 0
    phase: int = WITHDRAWN
    attempt: int = 0
    without: bool = False
    failed: int = 0
    error: str = ""
    invited: int = 0
    third: bool = False


@dataclass(frozen=True)
class Rank:
    """A survivor.

    step    that comes next
    page    of this rank
    attempt of its next call
    read    the peer's page as this rank has read it
    seen    it has seen the death in this call
    knows   it knows of the death from an earlier call
    error   that fails this call
    heard   the errors that have failed its calls, or were shown when they failed
    left    how often it still gives up
    """

    left: int
    step: str = "begin"
    page: Page = Page()
    attempt: int = 1
    read: Page = Page()
    seen: bool = False
    knows: bool = False
    error: tuple[str, int] = "", 0
    heard: frozenset[str] = frozenset()


State = tuple[tuple[Rank, Rank], bool]  # whether the third rank is dead


@dataclass(frozen=True)
class Explorer:
    """`names`: the ranks that name ranks. `gives_up`: how often each rank does so. `broken`: the rule that is
    dropped."""

    names: tuple[bool, bool]
    gives_up: tuple[int, int]
    broken: str = ""

    def explore(self, want: str = SAFE) -> tuple[str, int]:
        """As `every_order.search`."""
        edges: dict[State, list[State | str]] = {}

        def moves(state: State) -> list[State | str]:
            edges[state] = [*self._moves(state)]
            return edges[state]

        first, second = self.gives_up
        verdict, states = search(((Rank(first), Rank(second)), False), moves, want)
        if verdict == SAFE and not _all_can_end(edges):
            verdict = STUCK
        return verdict, states

    def _moves(self, state: State) -> Iterator[State | str]:
        ranks, dead = state
        if not dead:
            yield ranks, True
        for me in range(2):
            for after in self._steps(me, ranks[me], ranks[1 - me].page, dead):
                if isinstance(after, str):
                    yield after
                else:
                    yield ((after, ranks[1]) if me == 0 else (ranks[0], after)), dead

    def _steps(self, me: int, rank: Rank, theirs: Page, dead: bool) -> Iterator[Rank | str]:
        mine = rank.page
        if rank.left and rank.step in ("begin", "look", "meet"):
            number = mine.number + (rank.step == "begin")
            began = replace(rank, left=rank.left - 1, page=replace(mine, number=number))
            yield from self._fail(began, f"{me}'s call {number}", rank.attempt)
        if rank.step == "begin":
            live = theirs.attempt if theirs.phase != WITHDRAWN else 0
            yield replace(rank, step="post", attempt=max(rank.attempt, live))
        elif rank.step == "post":
            without = self.names[me] and rank.knows
            page = Page(mine.number + 1, PROPOSED, rank.attempt, without, mine.failed, mine.error)
            yield replace(rank, step="look", page=page)
        elif rank.step in ("look", "meet"):  # before it reads its peer's page
            yield replace(rank, step="read" if rank.step == "look" else "meet, read", seen=dead)
        elif rank.step == "read":
            yield replace(rank, step="agree", read=theirs)
        elif rank.step == "agree":
            seen = rank.seen if self.broken == "no look after the page is read" else dead
            fresh = replace(rank, read=Page(), seen=seen)
            if not self.names[me] and seen != rank.seen:  # it looks again at all
                yield replace(fresh, step="look", seen=False)
            else:
                yield from self._agree(me, fresh, rank.read)
        elif rank.step == "meet, read":
            yield from self._set_up(me, rank, theirs)
        elif rank.step == "fail":
            late = mine.phase == ACCEPTED and theirs.phase == DECIDED and theirs.invited == mine.number
            has = replace(rank, step="has it", error=("", 0), page=replace(mine, phase=DECIDED))
            yield has if late else self._withdrawn(me, rank, theirs, dead)

    def _withdrawn(self, me: int, rank: Rank, theirs: Page, dead: bool) -> Rank:
        mine, (error, failed) = rank.page, rank.error
        hopeless = self.names[me] and dead and not mine.without and self.broken != "a call without hope counts"
        shown = 0 if self.broken == "errors that are shown are heard" else theirs.failed
        heard = rank.heard | {error, theirs.error}
        page = Page(mine.number, WITHDRAWN, 0, mine.without, 0 if hopeless else failed, error)
        attempt = max(failed, shown) + 1
        return replace(rank, step="begin", page=page, attempt=attempt, heard=heard, error=("", 0), knows=dead)

    def _agree(self, me: int, rank: Rank, theirs: Page) -> Iterator[Rank | str]:
        mine, again, named = rank.page, replace(rank, step="look", seen=False), self.names[me]
        third = not (mine.without if named else rank.seen)
        differ = all(self.names) and mine.without != theirs.without and theirs.phase != WITHDRAWN
        earlier = self.broken == "earlier errors count" and theirs.phase == WITHDRAWN
        told = theirs.number > 0 and (theirs.failed >= mine.attempt or earlier)
        if named and rank.seen and not mine.without and not (differ and self.broken == "no death first"):
            yield from self._fail(rank, DEATH, mine.attempt)
        elif told:
            yield from self._fail(rank, theirs.error, theirs.failed)
        elif self.names[1 - me] and rank.seen and not theirs.without and self.broken != "a call without hope is met":
            yield again
        elif theirs.phase in (WITHDRAWN, DECIDED) or theirs.attempt < mine.attempt:
            yield again
        elif differ:
            yield DIFFER
        elif theirs.attempt > mine.attempt:
            after = replace(mine, attempt=theirs.attempt)
            yield again if self.broken == "no later attempt" else replace(again, page=after, attempt=theirs.attempt)
        elif me == 0:
            page = replace(mine, phase=INVITED, invited=theirs.number, third=third)
            yield replace(rank, step="meet", page=page)
        elif theirs.phase == INVITED and theirs.invited == mine.number and theirs.third == third:
            page = replace(mine, phase=ACCEPTED, invited=theirs.number, third=third)
            yield replace(rank, step="meet", page=page)
        else:
            yield again

    def _set_up(self, me: int, rank: Rank, theirs: Page) -> Iterator[Rank | str]:
        mine = rank.page
        if mine.third and rank.seen:
            yield from self._fail(rank, DEATH, mine.attempt)
        elif theirs.number != mine.invited or theirs.phase == WITHDRAWN:
            yield from self._fail(rank, theirs.error, max(theirs.failed, mine.attempt))
        elif not mine.third and theirs.phase == (ACCEPTED if me == 0 else DECIDED):
            yield replace(rank, step="has it", page=replace(mine, phase=DECIDED))
        else:
            yield replace(rank, step="meet", seen=False)

    def _fail(self, rank: Rank, error: str, failed: int) -> Iterator[Rank | str]:
        if error in rank.heard:
            yield AGAIN
        else:
            yield replace(rank, step="fail", seen=False, error=(error, failed))


def _all_can_end(edges: dict[State, list[State | str]]) -> bool:
    """Whether both ranks can have a group, whatever has happened so far."""
    ends = {state for state in edges if all(rank.step == "has it" for rank in state[0])}
    before = -1
    while len(ends) > before:
        before = len(ends)
        ends |= {state for state, after in edges.items() if not ends.isdisjoint(after)}
    return len(ends) == len(edges)


def cases() -> Iterator[tuple[str, str, Callable[[str], tuple[str, int]]]]:
    """Names, expected verdicts, and explorations, for `every_order.compare`."""
    named, ended = (True, True), (False, False)
    yield "shrink again: ranks that are named", SAFE, Explorer(named, (1, 1)).explore
    yield "shrink again: ranks that have ended", SAFE, Explorer(ended, (1, 1)).explore
    yield "shrink again: rank 0 names ranks", SAFE, Explorer((True, False), (1, 0)).explore
    yield "shrink again: rank 1 names ranks", SAFE, Explorer((False, True), (0, 1)).explore
    for names, broken, want, name in (
        (named, "earlier errors count", AGAIN, "an error has no number"),
        (ended, "errors that are shown are heard", AGAIN, "a next call hears an error of before"),
        (named, "no later attempt", STUCK, "a call does not join a later attempt"),
        (named, "a call without hope counts", AGAIN, "a call that cannot succeed shows its error"),
        (named, "a call without hope is met", DIFFER, "a call that cannot succeed is met"),
        (named, "no look after the page is read", DIFFER, "a rank looks for a death before it reads its peer's page"),
        (ended, "no look after the page is read", AGAIN, "a rank invites one that its peer knows to be dead"),
        (named, "no death first", DIFFER, "a rank says that its peer differs before it names a death"),
    ):
        yield f"shrink again: {name}", want, Explorer(names, (1, 0), broken).explore
