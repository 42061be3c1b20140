"""The fastest candidate at one point, by successive halving.

All candidates of a round are measured in turns, so that a drift of the machine hits all of them. After a round the
slower half leaves, and every candidate that is surely slower than the fastest. Wave after wave, candidates join that
look faster than the fastest so far. A candidate that the cost model, corrected by earlier measurements, predicts to be
slow never joins: that is where most of a grid's time would go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tricomm.perf.tuner.points import Candidate, Point, neighbours
from tricomm.perf.tuner.statistics import Estimate, estimate

# Measures every candidate this many times, in turns, and leaves out those with wrong results. Raises `BudgetExceeded`.
Measure = Callable[[Point, Sequence[Candidate], int], dict[Candidate, list[float]]]
Prior = Callable[[Point, Candidate], float]

# How much is measured at a point.
CANDIDATES = 12  # of the first wave
_PER_FAMILY = 2  # of these, from each family at least
_FIRST_SAMPLES = 2  # of a candidate in the first round
MOST = 16  # samples of a candidate in one wave
_WAVES = 8  # of candidates that look faster, or are neighbours of the fastest
_LIKELY = 6  # of the former, in a wave
_PATIENCE = 2  # waves without a new fastest candidate
_CLOSE = 0.01  # the relative difference that is not worth a measurement


class BudgetExceeded(Exception):
    """No time is left for another round."""


@dataclass
class Samples:
    """The samples at one point by candidate, in microseconds, and the candidates whose results are wrong."""

    point: Point
    times: dict[Candidate, list[float]] = field(default_factory=dict)
    wrong: set[Candidate] = field(default_factory=set)
    _estimates: dict[Candidate, Estimate] = field(default_factory=dict, repr=False)

    def measure_round(self, measure: Measure, candidates: Sequence[Candidate], repeats: int) -> None:
        """Measure the candidates. One that `measure` leaves out is wrong, and its earlier samples are dropped."""
        measured = measure(self.point, candidates, repeats)
        for candidate in candidates:
            self._estimates.pop(candidate, None)
            if candidate in measured:
                self.times.setdefault(candidate, []).extend(measured[candidate])
            else:
                self.wrong.add(candidate)
                self.times.pop(candidate, None)

    def estimate(self, candidate: Candidate) -> Estimate:
        if candidate not in self._estimates:
            self._estimates[candidate] = estimate(self.times[candidate])
        return self._estimates[candidate]

    def ranking(self, of: Iterable[Candidate] | None = None) -> list[Candidate]:
        """Fastest first. Ties are ordered by name, so that equal samples give equal orders."""
        known = self.times if of is None else [c for c in of if c in self.times]
        return sorted(known, key=lambda c: (self.estimate(c).centre, c))

    @property
    def best(self) -> Candidate | None:
        """The fastest so far."""
        order = self.ranking()
        return order[0] if order else None

    def rivals(self) -> list[Candidate]:
        """The candidates that may be faster than the best by more than a measurement is worth."""
        order = self.ranking()
        return [c for c in order[1:] if self.estimate(c).low < self.estimate(order[0]).high * (1 - _CLOSE)]


def successive_halving(
    samples: Samples,
    pool: Sequence[Candidate],
    seeds: Sequence[Candidate],
    prior: Prior,
    learn: Callable[[Samples], None],
    measure: Measure,
) -> None:
    """Find the fastest of `pool` at the point of `samples`; `seeds` (best nearby, in force) are measured in any case.
    Candidates that have samples already are not measured again, except the fastest, with which others are compared.

    `learn` gets the samples before `prior` is asked again. Raises `BudgetExceeded` if `measure` does; `samples` keeps
    all that was measured.
    """
    known = set(pool)
    first = _first_wave(samples.point, pool, seeds, prior)
    first = [c for c in first if c not in samples.times and c not in samples.wrong]
    if first:
        _halve(samples, first if samples.best is None else [samples.best, *first], measure)
    unchanged = 0
    for _ in range(_WAVES):
        best = samples.best
        if best is None or unchanged == _PATIENCE:
            return
        learn(samples)
        fresh = [c for c in pool if c not in samples.times and c not in samples.wrong]
        likely = _promising(samples.point, fresh, prior, _LIKELY, 1)
        near = [c for c in neighbours(best) if c in known and c in set(fresh)]
        candidates = [best, *dict.fromkeys([*near, *likely])]
        if len(candidates) == 1:
            return
        _halve(samples, candidates, measure)
        unchanged = unchanged + 1 if samples.best == best else 0


def _first_wave(point: Point, pool: Sequence[Candidate], seeds: Sequence[Candidate], prior: Prior) -> list[Candidate]:
    """The seeds, and the most promising candidates of every family, so that a wrong prior excludes no family."""
    others = [c for c in pool if c not in set(seeds)]
    return list(dict.fromkeys([*seeds, *_promising(point, others, prior, CANDIDATES, _PER_FAMILY)]))


def _promising(point: Point, of: Sequence[Candidate], prior: Prior, count: int, per_family: int) -> list[Candidate]:
    """The `count` candidates with the shortest predicted times, with `per_family` of every family among them."""
    times = {candidate: prior(point, candidate) for candidate in of}
    order = sorted(of, key=lambda c: (times[c], c))
    families = dict.fromkeys(c.family for c in order)
    chosen = dict.fromkeys(c for f in families for c in [c for c in order if c.family == f][:per_family])
    return [*chosen, *[c for c in order if c not in chosen][: max(0, count - len(chosen))]]


def _halve(samples: Samples, candidates: Sequence[Candidate], measure: Measure) -> None:
    """Rounds until the fastest is clear: each doubles the samples and halves the candidates."""
    repeats, remaining = _FIRST_SAMPLES, list(candidates)
    while len(remaining) > 1 or repeats == _FIRST_SAMPLES:
        samples.measure_round(measure, remaining, repeats)
        order = samples.ranking(remaining)
        if not order:
            return
        fastest = samples.estimate(order[0])
        half = order[: max(1, len(order) // 2)]
        remaining = [c for c in half if samples.estimate(c).low <= fastest.high]
        if remaining and max(samples.estimate(c).centre for c in remaining) <= fastest.centre * (1 + _CLOSE):
            return
        repeats *= 2
        if repeats > MOST:
            return
