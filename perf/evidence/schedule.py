"""Which case is next: tier by tier, within each stage's share of the budget first, then within the rest of the budget.

Nothing here reads a clock or starts anything: `next` gets the time that remains, `add_cost` the time of a case. A case
starts only if the time of similar cases in this run fits into the time that remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import NamedTuple

from tricomm.perf.evidence.stage import FIRST, Stage, StageCase

START = 5.0  # seconds that a stage's process needs before its first case
Key = tuple[str, str]  # of a case: the stage's name and its own


class PendingCase(NamedTuple):
    """A case that has not run yet."""

    stage: Stage
    case: StageCase

    @property
    def key(self) -> Key:
        return self.stage.name, self.case.key


@dataclass
class Schedule:
    """`waiting` is in order of tiers; `left` says why other cases do not run. `known` are the seconds of cases in
    earlier runs, and `cut` the seconds after which a case was ended because the budget was over."""

    waiting: list[PendingCase]
    left: dict[Key, str] = field(default_factory=dict)
    known: Mapping[Key, float] = field(default_factory=dict)
    cut: Mapping[Key, float] = field(default_factory=dict)
    tiers: dict[Key, int] = field(default_factory=dict)
    _spent: dict[str, float] = field(default_factory=dict)
    _costs: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    _shares: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Sequence[tuple[Stage, Sequence[StageCase]]], done: Sequence[Key] = ()) -> Schedule:
        """All cases but those that are done, by tier, and by stage within a tier."""
        entries = [PendingCase(stage, case) for stage, cases in stages for case in cases]
        tiers = {entry.key: entry.case.tier for entry in entries}
        waiting = sorted((e for e in entries if e.key not in set(done)), key=lambda e: e.case.tier)
        return cls(waiting, tiers=tiers)

    def next(self, remaining: float) -> PendingCase | None:
        """Take the next case that fits into `remaining` seconds; None if none does."""
        fitting = self._fitting(remaining, shared=True) or self._fitting(remaining, shared=False)
        if fitting is not None:
            self.waiting.remove(fitting)
        return fitting

    def _fitting(self, remaining: float, shared: bool) -> PendingCase | None:
        for entry in self.waiting:
            cost = self.estimate(entry)
            if cost > remaining:
                continue
            if not shared or entry.case.tier == FIRST:
                return entry
            if self._spent.get(entry.stage.name, 0.0) + cost <= self._share(entry.stage, remaining):
                return entry
        return None

    def estimate(self, entry: PendingCase) -> float:
        """Seconds: the mean of the stage's cases of the same tier in this run, or of all its cases, or of the tier in
        earlier runs; `START` without any of them."""
        name, tier = entry.stage.name, entry.case.tier
        similar = self._costs.get((name, tier))
        if not similar:
            similar = [seconds for (stage, _), costs in self._costs.items() if stage == name for seconds in costs]
        if not similar:
            similar = [seconds for key, seconds in self.known.items() if key[0] == name and self.tiers.get(key) == tier]
        return max(mean(similar) if similar else START, self.cut.get(entry.key, 0.0))

    def _share(self, stage: Stage, remaining: float) -> float:
        if not self._shares:  # of the time that remains after the cases of tier FIRST
            waiting = {entry.stage.name: entry.stage.share for entry in self.waiting if entry.case.tier != FIRST}
            whole = sum(waiting.values())
            self._shares = {name: remaining * share / whole for name, share in waiting.items()}
        return math.inf if math.isinf(remaining) else self._shares.get(stage.name, 0.0)

    def add_cost(self, entry: PendingCase, seconds: float) -> None:
        """Record the time of a case."""
        name = entry.stage.name
        self._spent[name] = self._spent.get(name, 0.0) + seconds
        self._costs.setdefault((name, entry.case.tier), []).append(seconds)

    def leave_stage(self, name: str, reason: str) -> None:
        """Leave out the waiting cases of a stage."""
        self._leave(reason, lambda entry: entry.stage.name == name)

    def leave_dependents(self, needed: str, reason: str) -> None:
        """Leave out the cases that need the case "stage/key"."""
        self._leave(reason, lambda entry: needed in (*entry.stage.needs, *entry.case.needs))

    def _leave(self, reason: str, which: Callable[[PendingCase], bool]) -> None:
        out = [entry for entry in self.waiting if which(entry)]
        self.left |= {entry.key: reason for entry in out}
        self.waiting = [entry for entry in self.waiting if entry not in out]
