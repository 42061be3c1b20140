"""Changes of level are found where they are, small ones in quiet series, and hardly ever where there are none."""

from __future__ import annotations

import numpy as np
import pytest

from tricomm.perf.dashboard.change_points import find


def _noise(seed: int, count: int, spread: float = 0.02) -> np.ndarray:  # type: ignore[type-arg]
    draw = np.random.default_rng(seed)
    series = 100 * (1 + spread * draw.standard_normal(count))
    series[draw.random(count) < 0.05] *= 3  # outliers, as measurements have them
    return series


@pytest.mark.parametrize("count", [14, 20, 60, 200])
def test_unchanged_series_are_left_alone(count: int) -> None:
    alarms = sum(bool(find(_noise(seed, count).tolist())) for seed in range(1000))
    assert alarms <= 6  # one is expected; more than six come once in ten thousand times


@pytest.mark.parametrize(("before", "after"), [(30, 30), (60, 8), (8, 60), (7, 7)])
def test_a_step_of_ten_per_cent_is_found_where_it_is(before: int, after: int) -> None:
    series = _noise(before, before + after, 0.01)
    series[before:] *= 1.1
    (change,) = find(series.tolist())
    assert abs(change.at - before) <= 1
    assert change.before == pytest.approx(100, rel=0.02) and change.after == pytest.approx(110, rel=0.02)
