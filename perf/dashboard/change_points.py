"""Changes of the level of a series of measurements, by a rank test, which tolerates noise of any shape and outliers.

For every split of a series, the Mann-Whitney statistic measures how clearly one side is above the other. The largest
value is compared with the largest values of shuffled series of the same length. So there is no threshold in per cent: a
noisy series needs a larger step than a quiet one. A value that one in a thousand unchanged series reaches is a change.
Both sides of a change are tested again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

FALSE_ALARMS = 1e-3  # probability, for a series in which nothing has changed
FEWEST = 14  # measurements; with fewer, every order is more likely than `FALSE_ALARMS`
LATE = FEWEST // 2  # measurements after a step by which it is found
_KNOWN = 4  # measurements from which `unproven` estimates the variation of a level
_SIDE = 3  # fewest measurements of a level
_LENGTHS = (*range(FEWEST, 25), 32, 48, 64, 96, 128, 192, 256, 512)
_SHUFFLES = 20000


@dataclass(frozen=True)
class Change:
    """The median is `after` from measurement number `at` on, and `before` until then."""

    at: int
    before: float
    after: float


def find(values: Sequence[float]) -> list[Change]:
    """The changes of a series, in order; only the latest 512 values count."""
    series = np.asarray(values[-_LENGTHS[-1] :], dtype=np.float64)
    first = len(values) - len(series)
    places = sorted(_split(series, 0, len(series)))
    changes = []
    for number, at in enumerate(places):
        begin = places[number - 1] if number else 0
        end = places[number + 1] if number + 1 < len(places) else len(series)
        changes.append(Change(first + at, float(np.median(series[begin:at])), float(np.median(series[at:end]))))
    return changes


def unproven(values: Sequence[float], found: Sequence[Change]) -> Change | None:
    """A step up that is too recent for `find`, whose result is `found`: the latest measurements exceed all others since
    the last change by more than the spread of those."""
    level = values[found[-1].at :] if found else values
    for count in range(1, min(LATE, len(level) - _KNOWN + 1)):
        before, late = level[:-count], level[-count:]
        if min(late) > 2 * max(before) - min(before):
            return Change(len(values) - count, float(np.median(before)), float(np.median(late)))
    return None


def _split(series: NDArray[np.float64], begin: int, end: int) -> list[int]:
    count = end - begin
    if count < FEWEST:
        return []
    score, at = max(_best(series[begin + a : begin + b], begin + a) for a, b in _intervals(count))
    if score <= _threshold(next(n for n in _LENGTHS if n >= count)):
        return []
    return [*_split(series, begin, at), at, *_split(series, at, end)]


def _intervals(count: int) -> list[tuple[int, int]]:
    """The parts to test: the whole series, and halves of it, because a step up and down again may not show in the
    whole."""
    half, quarter = count // 2, count // 4
    halves = [(0, half), (quarter, quarter + half), (count - half, count)]
    return [(0, count), *(halves if half >= FEWEST else [])]


def _best(series: NDArray[np.float64], first: int) -> tuple[float, int]:
    """The largest score of a series that begins at number `first`, and the number at which its right side begins."""
    scores = _scores(_ranks(series)[None, :])[0]
    at = int(np.argmax(scores))
    return float(scores[at]), first + _SIDE + at


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 for the smallest; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return mean


def _scores(ranks: NDArray[np.float64]) -> NDArray[np.float64]:
    """[series, splits]: the distance of the sum of a side's ranks from its expectation, in standard deviations."""
    count = ranks.shape[1]
    left = np.arange(_SIDE, count - _SIDE + 1)
    sums = np.cumsum(ranks, axis=1)[:, left - 1]
    spread = np.sqrt(left * (count - left) * (count + 1) / 12)
    scores: NDArray[np.float64] = np.abs(sums - left * (count + 1) / 2) / spread
    return scores


@cache
def _threshold(count: int) -> float:
    """The value that the largest score exceeds in `FALSE_ALARMS` of all unchanged series of `count`."""
    shuffles = np.random.default_rng(0).random((_SHUFFLES if count <= 64 else _SHUFFLES // 4, count))
    largest = [
        _scores(shuffles[:, a:b].argsort(axis=1).argsort(axis=1).astype(np.float64) + 1).max(axis=1)
        for a, b in _intervals(count)
    ]
    return float(np.quantile(np.max(largest, axis=0), 1 - FALSE_ALARMS))
