"""All points under one budget: sizes from coarse to fine first, then more samples for decisions that are close.

Knows no device and no clock: `measure` returns times, and ends the search by raising `BudgetExceeded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tricomm.perf.tuner.points import Candidate, Point, PointGroup
from tricomm.perf.tuner.statistics import Gain, gain
from tricomm.perf.tuner.successive_halving import MOST, BudgetExceeded, Measure, Prior, Samples, successive_halving

Pool = Callable[[Point], Sequence[Candidate]]
InForce = Callable[[Point], Candidate]

_ROUNDS = 4  # passes over all points; each pass starts from the results of the one before


@dataclass(frozen=True)
class Decision:
    """The fastest candidate at a point, the present one, and the gain of a change. `measured` counts samples."""

    point: Point
    best: Candidate
    time_us: float
    in_force: Candidate
    in_force_us: float
    gain: Gain
    measured: int

    @property
    def changed(self) -> bool:
        """Whether another candidate is faster beyond doubt; a gain that may be zero is no reason to change."""
        return self.best != self.in_force and self.gain.low > 0

    @property
    def chosen(self) -> Candidate:
        return self.best if self.changed else self.in_force


class Corrected:
    """A prior that learns from its errors for similar candidates of the same family at similar sizes.

    Similarity falls with every doubling of blocks, warps and tile, and with every fourfold size.
    """

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self._errors: dict[tuple[object, ...], dict[tuple[float, ...], float]] = {}
        self._arrays: dict[tuple[object, ...], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def __call__(self, point: Point, candidate: Candidate) -> float:
        time_us = self._prior(point, candidate)
        known = self._arrays.get((point.group, candidate.family))
        if known is None:
            return time_us
        there, log_errors = known
        weights = np.exp(-np.abs(there - _coordinates(point, candidate)).sum(axis=1))
        return time_us * math.exp(float(weights @ log_errors) / (float(weights.sum()) + 1e-12))

    def learn(self, samples: Samples) -> None:
        """Take in the samples of a point."""
        point = samples.point
        for candidate in samples.times:
            log_error = math.log(samples.estimate(candidate).centre / self._prior(point, candidate))
            self._errors.setdefault((point.group, candidate.family), {})[_coordinates(point, candidate)] = log_error
        for key in {(point.group, candidate.family) for candidate in samples.times}:
            self._arrays[key] = np.array(list(self._errors[key])), np.array(list(self._errors[key].values()))


def _coordinates(point: Point, candidate: Candidate) -> tuple[float, ...]:
    shape = (candidate.blocks, candidate.warps, candidate.tile)
    return (math.log2(point.nbytes + 1) / 2, *(math.log2(value) for value in shape))


def search(points: Sequence[Point], pool: Pool, in_force: InForce, prior: Prior, measure: Measure) -> list[Decision]:
    """The decision at every point that was reached, in the order of `points`."""
    samples = {point: Samples(point) for point in points}
    try:
        corrected = Corrected(prior)
        for _ in range(_ROUNDS):
            before = [here.best for here in samples.values()]
            _every_point(samples, pool, in_force, corrected, measure)
            if [here.best for here in samples.values()] == before:
                break
        _refine(samples, measure)
    except BudgetExceeded:
        pass
    decisions = [_decision(measured, in_force(point)) for point, measured in samples.items()]
    return [decision for decision in decisions if decision is not None]


def _every_point(
    samples: dict[Point, Samples], pool: Pool, in_force: InForce, prior: Corrected, measure: Measure
) -> None:
    best_by_size: dict[PointGroup, dict[int, Candidate]] = {}
    for point in _coarse_to_fine(list(samples)):
        near, here = best_by_size.setdefault(point.group, {}), samples[point]
        seeds = [in_force(point), *(near[size] for size in _adjacent(list(near), point.nbytes))]
        try:
            successive_halving(here, pool(point), seeds, prior, prior.learn, measure)
        finally:
            prior.learn(here)
        if here.best is not None:
            near[point.nbytes] = here.best


def _refine(samples: dict[Point, Samples], measure: Measure) -> None:
    """More samples for points without a clear winner; the point with the most to lose first."""
    while True:
        unclear = [(here, rivals) for here in samples.values() if (rivals := here.rivals())]
        unclear = [(here, rivals) for here, rivals in unclear if len(here.times[rivals[0]]) < 2 * MOST]
        if not unclear:
            return
        here, rivals = max(unclear, key=lambda item: _at_stake(*item))
        here.measure_round(measure, [here.ranking()[0], *rivals[:3]], MOST // 2)


def _at_stake(samples: Samples, rivals: list[Candidate]) -> float:
    best = samples.ranking()[0]
    return 1 - min(samples.estimate(c).low for c in rivals) / samples.estimate(best).centre


def _decision(samples: Samples, in_force: Candidate) -> Decision | None:
    """None if there is nothing to compare: no candidate is right, or the one in force was not measured."""
    best = samples.best
    if best is None:
        return None
    measured = sum(len(times) for times in samples.times.values())
    time_us = samples.estimate(best).centre
    if in_force in samples.wrong:
        return Decision(samples.point, best, time_us, in_force, math.inf, Gain(1.0, 1.0, 1.0), measured)
    if in_force not in samples.times:
        return None
    saved = gain(samples.times[in_force], samples.times[best])
    return Decision(samples.point, best, time_us, in_force, samples.estimate(in_force).centre, saved, measured)


def _coarse_to_fine(points: list[Point]) -> list[Point]:
    """Of every group both ends, then the middle of each gap: an interrupted search has covered the whole range."""
    groups: dict[PointGroup, list[Point]] = {}
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


def _adjacent(sizes: list[int], nbytes: int) -> list[int]:
    """The nearest sizes below and above."""
    below, above = [s for s in sizes if s < nbytes], [s for s in sizes if s > nbytes]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]
