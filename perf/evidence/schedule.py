"""Which case is next: by value, within each stage's share of the budget first, then with what is left of it.

Nothing here looks at a clock or starts anything: `next` is told how much time is left, `took` what a case has cost.
A case is started only if what its like have taken in this run fits into the time that is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from tricomm.perf.evidence.stage import FIRST, Case, Stage

START = 5.0  # seconds that a stage's process needs before its first case: less than this is no use
Key = tuple[str, str]  # of a case: the stage's name and its own


@dataclass(frozen=True)
class Entry:
    """A case that is waiting."""

    stage: Stage
    case: Case

    @property
    def key(self) -> Key:
        return self.stage.name, self.case.key


@dataclass
class Schedule:
    """`waiting` is in the order of value; `left` says why others are not run. `known` are the seconds that cases have
    taken in earlier runs, and `cut` those after which one was ended because the budget was over."""

    waiting: list[Entry]
    left: dict[Key, str] = field(default_factory=dict)
    known: Mapping[Key, float] = field(default_factory=dict)
    cut: Mapping[Key, float] = field(default_factory=dict)
    tiers: dict[Key, int] = field(default_factory=dict)
    _spent: dict[str, float] = field(default_factory=dict)
    _costs: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    _shares: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Sequence[tuple[Stage, Sequence[Case]]], done: Sequence[Key] = ()) -> Schedule:
        """All cases but those that are done; what decides about the rest comes first, then tier by tier and stage by
        stage."""
        entries = [Entry(stage, case) for stage, cases in stages for case in cases]
        tiers = {entry.key: entry.case.tier for entry in entries}
        waiting = sorted((e for e in entries if e.key not in set(done)), key=lambda e: e.case.tier)
        return cls(waiting, tiers=tiers)

    def next(self, remaining: float) -> Entry | None:
        """Take the next case that fits into `remaining` seconds; None if none does."""
        found = self._fitting(remaining, shared=True) or self._fitting(remaining, shared=False)
        if found is not None:
            self.waiting.remove(found)
        return found

    def _fitting(self, remaining: float, shared: bool) -> Entry | None:
        for entry in self.waiting:
            cost = self.estimate(entry)
            if cost > remaining:
                continue
            if not shared or entry.case.tier == FIRST:
                return entry
            if self._spent.get(entry.stage.name, 0.0) + cost <= self._share(entry.stage, remaining):
                return entry
        return None

    def estimate(self, entry: Entry) -> float:
        """Seconds: what the stage's cases of the same tier have taken in this run, or all of them, or in a run before;
        `START` if nothing is known."""
        name, tier = entry.stage.name, entry.case.tier
        like = self._costs.get((name, tier)) or [s for (n, _), all_ in self._costs.items() if n == name for s in all_]
        if not like:
            like = [seconds for key, seconds in self.known.items() if key[0] == name and self.tiers.get(key) == tier]
        return max(mean(like) if like else START, self.cut.get(entry.key, 0.0))

    def _share(self, stage: Stage, remaining: float) -> float:
        if not self._shares:  # of the time that is left when the first case that is not FIRST is about to start
            waiting = {entry.stage.name: entry.stage.share for entry in self.waiting if entry.case.tier != FIRST}
            whole = sum(waiting.values())
            self._shares = {name: remaining * share / whole for name, share in waiting.items()}
        return math.inf if math.isinf(remaining) else self._shares.get(stage.name, 0.0)

    def took(self, entry: Entry, seconds: float) -> None:
        """Note what a case has cost."""
        name = entry.stage.name
        self._spent[name] = self._spent.get(name, 0.0) + seconds
        self._costs.setdefault((name, entry.case.tier), []).append(seconds)

    def leave_stage(self, name: str, reason: str) -> None:
        """Leave out what is waiting of a stage."""
        self._leave(reason, lambda entry: entry.stage.name == name)

    def leave_dependents(self, needed: str, reason: str) -> None:
        """Leave out what needs the case "stage/key"."""
        self._leave(reason, lambda entry: needed in (*entry.stage.needs, *entry.case.needs))

    def _leave(self, reason: str, which: Callable[[Entry], bool]) -> None:
        out = [entry for entry in self.waiting if which(entry)]
        self.left |= {entry.key: reason for entry in out}
        self.waiting = [entry for entry in self.waiting if entry not in out]
