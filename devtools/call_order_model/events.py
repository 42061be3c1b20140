"""The events of all ranks: the events of each rank, and the ends of calls that all members have begun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from devtools.call_order_model.ranks import DEADLOCK, MISMATCH, WRONG, Frozen, Groups, Program, Queued, Rank, Rules
from devtools.every_order import search


class Case(NamedTuple):
    """The program of each rank, and the expected verdict: SAFE for all orders, or the fault of some order."""

    name: str
    want: str
    programs: tuple[Program, ...]
    groups: Groups
    rules: Rules = Rules()


class _End(NamedTuple):
    """The end of a call on one rank, and the number of the rank's next state."""

    group: str
    slot: str
    name: str
    identity: str
    state: int


class _View(NamedTuple):
    """One state of a rank, as the search uses it."""

    moves: list[int | str]
    ends: list[_End]
    begun: dict[tuple[str, str], tuple[str, str]]  # (group, slot) -> (name, identity)
    identities: dict[str, str]  # of all calls: name -> identity
    no_threads: bool
    ended: bool


State = tuple[int, ...]  # by rank, the number of its state


class _Ranks:
    """Numbers the states of each rank, so that each state is expanded once, not once per state of the other ranks."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._numbers: list[dict[Frozen, int]] = [{} for _ in case.programs]
        self._states: list[list[Frozen]] = [[] for _ in case.programs]
        self._views: list[dict[int, _View]] = [{} for _ in case.programs]
        self.start: State = tuple(self._number(rank, self._rank(rank).frozen()) for rank in range(len(case.programs)))

    def moves(self, state: State) -> Iterator[State | str]:
        views = [self._view(rank, number) for rank, number in enumerate(state)]
        moved = False
        for rank, view in enumerate(views):
            for move in view.moves:
                moved = True
                yield move if isinstance(move, str) else (*state[:rank], move, *state[rank + 1 :])
            for end in view.ends:
                met = [views[member].begun.get((end.group, end.slot)) for member in self._case.groups[end.group]]
                if None not in met:
                    moved = True
                    yield self._fault(end, met) or (*state[:rank], end.state, *state[rank + 1 :])
        if not moved and not all(view.ended for view in views):
            yield MISMATCH if self._differ(views) else DEADLOCK

    def _fault(self, end: _End, met: list[tuple[str, str] | None]) -> str | None:
        if self._case.rules.match == "records" and any(call and call[1] != end.identity for call in met):
            return MISMATCH
        return WRONG if any(call and call[0] != end.name for call in met) else None

    def _differ(self, views: list[_View]) -> bool:
        """True if a rank has begun a call to which another member gave another identity, or that it will never make."""
        pairs = [(end, views[m]) for view in views for end in view.ends for m in self._case.groups[end.group]]
        return any(
            view.identities.get(e.name, "" if view.no_threads else e.identity) != e.identity for e, view in pairs
        )

    def _rank(self, rank: int, state: Frozen | None = None) -> Rank:
        return Rank(rank, self._case.programs[rank], self._case.groups, self._case.rules, state)

    def _number(self, rank: int, state: Frozen) -> int:
        number = self._numbers[rank].setdefault(state, len(self._states[rank]))
        if number == len(self._states[rank]):
            self._states[rank].append(state)
        return number

    def _end(self, rank: int, name: str, call: Queued, state: Frozen) -> _End:
        return _End(call.group, call.slot, name, call.identity, self._number(rank, state))

    def _view(self, rank: int, number: int) -> _View:
        view = self._views[rank].get(number)
        if view is None:
            now = self._rank(rank, self._states[rank][number])
            view = self._views[rank][number] = _View(
                [move if isinstance(move, str) else self._number(rank, move) for move in now.moves()],
                [self._end(rank, name, now.calls[name], state) for name, state in now.finishes()],
                {(c.group, c.slot): (name, c.identity) for name, c in now.calls.items() if c.state != "queued"},
                {name: c.identity for name, c in now.calls.items()},
                not now.threads,
                now.ended,
            )
        return view


def explore(case: Case, want: str) -> tuple[str, int]:
    """As `every_order.search`."""
    ranks = _Ranks(case)
    return search(ranks.start, ranks.moves, want)
