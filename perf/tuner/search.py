"""All points under one budget: coarse to fine over sizes first, then where a decision is still close.

Knows no device and no clock: `measure` is whatever gives times, and ends the search by raising `Spent`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tricomm.perf.tuner.points import Candidate, Point
from tricomm.perf.tuner.statistics import Gain, gain
from tricomm.perf.tuner.successive_halving import Field, Measure, Prior, Rules, Spent, race

Pool = Callable[[Point], Sequence[Candidate]]
InForce = Callable[[Point], Candidate]


@dataclass(frozen=True)
class Decision:
    """The fastest at a point, and what it saves of what was in force there; `measured` is how many samples it took."""

    point: Point
    best: Candidate
    time_us: float
    in_force: Candidate
    in_force_us: float
    gain: Gain
    measured: int

    @property
    def changed(self) -> bool:
        """Whether another candidate is surely faster: a gain that may be none is no reason to change."""
        return self.best != self.in_force and self.gain.low > 0

    @property
    def chosen(self) -> Candidate:
        return self.best if self.changed else self.in_force


class Corrected:
    """A prior that learns: by how much it was off for candidates like this one, of its family, at sizes like this one.

    Likeness falls with every doubling of blocks, warps and tile, and with every fourfold size.
    """

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self._seen: dict[tuple[object, ...], dict[tuple[float, ...], float]] = {}

    def __call__(self, point: Point, candidate: Candidate) -> float:
        time_us = self._prior(point, candidate)
        seen = self._seen.get((point.group, candidate.family))
        if not seen:
            return time_us
        here, total, weights = _place(point, candidate), 0.0, 0.0
        for there, off in seen.items():
            weight = math.exp(-sum(abs(a - b) for a, b in zip(here, there, strict=True)))
            total += weight * off
            weights += weight
        return time_us * math.exp(total / (weights + 1e-12))

    def learn(self, field: Field) -> None:
        """Take in what a race has measured so far."""
        for candidate in field.samples:
            off = math.log(field.estimate(candidate).centre / self._prior(field.point, candidate))
            key = (field.point.group, candidate.family)
            self._seen.setdefault(key, {})[_place(field.point, candidate)] = off


def _place(point: Point, candidate: Candidate) -> tuple[float, ...]:
    shape = (candidate.blocks, candidate.warps, candidate.tile)
    return (math.log2(point.nbytes + 1) / 2, *(math.log2(value) for value in shape))


def search(
    points: Sequence[Point], pool: Pool, in_force: InForce, prior: Prior, measure: Measure, rules: Rules | None = None
) -> list[Decision]:
    """The decision at every point that was reached, in the order of `points`."""
    rules = rules or Rules()
    fields = {point: Field(point) for point in points}
    try:
        _first_round(fields, pool, in_force, Corrected(prior), measure, rules)
        _refine(fields, measure, rules)
    except Spent:
        pass
    found = [_decision(field, in_force(point)) for point, field in fields.items()]
    return [decision for decision in found if decision is not None]


def _first_round(
    fields: dict[Point, Field], pool: Pool, in_force: InForce, prior: Corrected, measure: Measure, rules: Rules
) -> None:  # fmt: skip
    done: dict[tuple[str, int, str], dict[int, Candidate]] = {}
    for point in _coarse_to_fine(list(fields)):
        near = done.setdefault(point.group, {})
        seeds = [in_force(point), *(near[size] for size in _beside(list(near), point.nbytes))]
        try:
            race(fields[point], pool(point), seeds, prior, prior.learn, measure, rules)
        finally:
            prior.learn(fields[point])
        best = fields[point].best
        if best is not None:
            near[point.nbytes] = best


def _refine(fields: dict[Point, Field], measure: Measure, rules: Rules) -> None:
    """More samples where the winner is not clear, the closest decision of the most to lose first."""
    while True:
        open_ones = [(f, rivals) for f in fields.values() if (rivals := f.rivals(rules.close))]
        open_ones = [(f, r) for f, r in open_ones if len(f.samples[r[0]]) < 2 * rules.most]
        if not open_ones:
            return
        field, rivals = max(open_ones, key=lambda item: _at_stake(*item))
        best = field.best
        field.run(measure, [best, *rivals[:3]] if best is not None else rivals[:3], rules.most // 2)


def _at_stake(field: Field, rivals: list[Candidate]) -> float:
    best = field.ranking()[0]
    return 1 - min(field.estimate(c).low for c in rivals) / field.estimate(best).centre


def _decision(field: Field, in_force: Candidate) -> Decision | None:
    """None where nothing right was measured, or not what is in force: then there is nothing to compare."""
    best = field.best
    if best is None:
        return None
    measured = sum(len(samples) for samples in field.samples.values())
    time_us = field.estimate(best).centre
    if in_force in field.wrong:
        return Decision(field.point, best, time_us, in_force, math.inf, Gain(1.0, 1.0, 1.0), measured)
    if in_force not in field.samples:
        return None
    saved = gain(field.samples[in_force], field.samples[best])
    return Decision(field.point, best, time_us, in_force, field.estimate(in_force).centre, saved, measured)


def _coarse_to_fine(points: list[Point]) -> list[Point]:
    """Of every group the ends, then the middle of what lies between: a search that is cut off has seen all of it."""
    groups: dict[tuple[str, int, str], list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    ranked = [(_depth(i, len(group)), i, point) for group in groups.values() for i, point in enumerate(group)]
    return [point for _, _, point in sorted(ranked, key=lambda item: item[:2])]


def _depth(index: int, count: int) -> int:
    low, high, depth = 0, count - 1, 0
    while index not in (low, high):
        middle, depth = (low + high) // 2, depth + 1
        if index == middle:
            return depth
        low, high = (low, middle) if index < middle else (middle, high)
    return depth


def _beside(sizes: list[int], nbytes: int) -> list[int]:
    """The nearest sizes below and above."""
    below, above = [s for s in sizes if s < nbytes], [s for s in sizes if s > nbytes]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]
