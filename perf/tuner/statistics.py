"""Robust statistics of a few noisy times: a centre without outliers, its standard error, and the gain of a change.

Times on a shared machine are skewed upwards, so medians and deviations from them are used instead of means.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

_TO_SIGMA = 1.4826  # from a median of deviations to a standard deviation, for normal noise
_OF_MEDIAN = 1.2533  # a median's standard error over a mean's, for normal noise
_LEAST = 0.01  # least relative spread; with few samples a smaller one is chance
_OUTLIER = 5.0  # deviations
_RESAMPLES = 400


class Estimate(NamedTuple):
    """The centre of some times and its standard error, in their unit."""

    centre: float
    error: float

    @property
    def low(self) -> float:
        return self.centre - 2 * self.error

    @property
    def high(self) -> float:
        return self.centre + 2 * self.error


@dataclass(frozen=True)
class Gain:
    """The part of the time that a change saves: expected value, and its 95 % confidence interval."""

    expected: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.expected:+.1%} (95 %: {self.low:+.1%} to {self.high:+.1%})"


def kept(samples: Sequence[float]) -> list[float]:
    """The samples without outliers far above the others, such as from an interrupt or another job."""
    middle = median(samples)
    spread = max(_TO_SIGMA * median(abs(s - middle) for s in samples), _LEAST * middle)
    return [s for s in samples if s <= middle + _OUTLIER * spread]


def estimate(samples: Sequence[float]) -> Estimate:
    """The centre of at least one sample."""
    good = kept(samples)
    middle = median(good)
    spread = max(_TO_SIGMA * median(abs(s - middle) for s in good), _LEAST * middle)
    return Estimate(middle, _OF_MEDIAN * spread / math.sqrt(len(good)))


def gain(old: Sequence[float], new: Sequence[float]) -> Gain:
    """The gain of `new` over `old`, by resampling both, which is deterministic."""
    before, after, draw = kept(old), kept(new), random.Random(0)

    def once() -> float:
        a = median(draw.choices(before, k=len(before)))
        return 1 - median(draw.choices(after, k=len(after))) / a

    gains = sorted(once() for _ in range(_RESAMPLES))
    edge = _RESAMPLES // 40
    return Gain(1 - median(after) / median(before), gains[edge], gains[-edge - 1])
