"""Who wins at one point: racing with successive halving, wave after wave of what looks better than the winner so far.

All entrants of a heat are measured in turns, so that a drift hits all of them; the slower half leaves, and whoever is
surely slower than the first. What the cost model, corrected by what was measured before,
thinks slow is never entered: that is where most of a grid's time would go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tricomm.perf.tuner.points import Candidate, Point, neighbours
from tricomm.perf.tuner.statistics import Estimate, estimate

# Measures every candidate so many times, in turns; leaves out those that are wrong. Raises `Spent` without time left.
Measure = Callable[[Point, Sequence[Candidate], int], dict[Candidate, list[float]]]
Prior = Callable[[Point, Candidate], float]


class Spent(Exception):
    """The budget is used up."""


@dataclass(frozen=True)
class Rules:
    """How hard a race looks. `close` is the difference that is not worth a measurement."""

    entrants: int = 12
    per_family: int = 2
    first: int = 2  # samples in the first heat
    most: int = 16  # samples of one candidate in a race
    waves: int = 8  # of candidates that look better, by what was measured, or are neighbours of the first
    likely: int = 6  # of the former, in a wave
    patience: int = 2  # waves without a new first
    close: float = 0.01


@dataclass
class Field:
    """What is known at one point: samples by candidate, and who has turned out to be wrong."""

    point: Point
    samples: dict[Candidate, list[float]] = field(default_factory=dict)
    wrong: set[Candidate] = field(default_factory=set)

    def run(self, measure: Measure, candidates: Sequence[Candidate], repeats: int) -> None:
        """A heat. Who does not come back from it is out."""
        found = measure(self.point, candidates, repeats)
        for candidate in candidates:
            if candidate in found:
                self.samples.setdefault(candidate, []).extend(found[candidate])
            else:
                self.wrong.add(candidate)
                self.samples.pop(candidate, None)

    def estimate(self, candidate: Candidate) -> Estimate:
        return estimate(self.samples[candidate])

    def ranking(self, of: Iterable[Candidate] | None = None) -> list[Candidate]:
        """Fastest first; equal ones by name, so that equal samples give equal orders."""
        known = self.samples if of is None else [c for c in of if c in self.samples]
        return sorted(known, key=lambda c: (self.estimate(c).centre, c))

    @property
    def best(self) -> Candidate | None:
        """The fastest so far."""
        order = self.ranking()
        return order[0] if order else None

    def rivals(self, close: float) -> list[Candidate]:
        """Who may be faster than the best by more than `close`."""
        order = self.ranking()
        return [c for c in order[1:] if self.estimate(c).low < self.estimate(order[0]).high * (1 - close)]


def race(
    field: Field, pool: Sequence[Candidate], seeds: Sequence[Candidate], prior: Prior, learn: Callable[[Field], None],
    measure: Measure, rules: Rules,
) -> None:  # fmt: skip
    """Find the fastest of `pool` at the field's point; `seeds` (of neighbouring sizes, in force) run in any case.

    `learn` is told what was measured before `prior` is asked again. Raises `Spent` when `measure` does; the field keeps
    what was measured.
    """
    known = set(pool)
    _heats(field, _entrants(field.point, pool, seeds, prior, rules), measure, rules)
    stayed = 0
    for _ in range(rules.waves):
        leader = field.best
        if leader is None or stayed == rules.patience:
            return
        learn(field)
        fresh = [c for c in pool if c not in field.samples and c not in field.wrong]
        likely = _promising(field.point, fresh, prior, rules.likely, 1)
        near = [c for c in neighbours(leader) if c in known and c in set(fresh)]
        entrants = [leader, *dict.fromkeys([*near, *likely])]
        if len(entrants) == 1:
            return
        _heats(field, entrants, measure, rules)
        stayed = stayed + 1 if field.best == leader else 0


def _entrants(
    point: Point, pool: Sequence[Candidate], seeds: Sequence[Candidate], prior: Prior, rules: Rules
) -> list[Candidate]:  # fmt: skip
    """The seeds, and whoever looks fastest, of every family, so that a wrong prior excludes none."""
    likely = _promising(point, [c for c in pool if c not in set(seeds)], prior, rules.entrants, rules.per_family)
    return list(dict.fromkeys([*seeds, *likely]))


def _promising(point: Point, of: Sequence[Candidate], prior: Prior, count: int, per_family: int) -> list[Candidate]:
    """So many that look fastest, and the best of every family in any case."""
    times = {candidate: prior(point, candidate) for candidate in of}
    order = sorted(of, key=lambda c: (times[c], c))
    families = dict.fromkeys(c.family for c in order)
    chosen = dict.fromkeys(c for f in families for c in [c for c in order if c.family == f][:per_family])
    return [*chosen, *[c for c in order if c not in chosen][: max(0, count - len(chosen))]]


def _heats(field: Field, entrants: Sequence[Candidate], measure: Measure, rules: Rules) -> None:
    repeats, running = rules.first, list(entrants)
    while len(running) > 1 or repeats == rules.first:
        field.run(measure, running, repeats)
        order = field.ranking(running)
        if not order:
            return
        leader = field.estimate(order[0])
        half = order[: max(1, len(order) // 2)]
        running = [c for c in half if field.estimate(c).low <= leader.high]
        if running and max(field.estimate(c).centre for c in running) <= leader.centre * (1 + rules.close):
            return
        repeats *= 2
        if repeats > rules.most:
            return
