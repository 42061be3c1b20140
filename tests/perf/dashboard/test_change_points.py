"""Changes of level are found at their place, also small ones in quiet series, and hardly ever in noise."""

import numpy as np
import pytest

from tricomm.perf.dashboard import change_points
from tricomm.perf.dashboard.change_points import Change, find


def _noise(seed: int, count: int, spread: float = 0.02) -> np.ndarray:  # type: ignore[type-arg]
    draw = np.random.default_rng(seed)
    series = 100 * (1 + spread * draw.standard_normal(count))
    series[draw.random(count) < 0.05] *= 3  # outliers, as measurements have them
    return series


@pytest.mark.parametrize("count", [14, 20, 60, 200])
def test_unchanged_series_are_left_alone(count: int) -> None:
    alarms = sum(bool(find(_noise(seed, count).tolist())) for seed in range(1000))
    assert alarms <= 6  # one is expected; more than six have a probability of 1e-4


@pytest.mark.parametrize(("before", "after"), [(30, 30), (60, 8), (8, 60), (7, 7)])
def test_a_step_of_ten_per_cent_is_found_where_it_is(before: int, after: int) -> None:
    series = _noise(before, before + after, 0.01)
    series[before:] *= 1.1
    (change,) = find(series.tolist())
    assert abs(change.at - before) <= 1
    assert change.before == pytest.approx(100, rel=0.02) and change.after == pytest.approx(110, rel=0.02)


def test_a_change_is_not_decided_by_its_percentage() -> None:
    quiet, noisy = (_noise(3, 80, spread) for spread in (0.001, 0.2))
    for series in (quiet, noisy):
        series[40:] *= 1.01
    assert [abs(c.at - 40) <= 1 for c in find(quiet.tolist())] == [True] and find(noisy.tolist()) == []


def test_several_changes_and_equal_values() -> None:
    assert find([5.0] * 20 + [6.0] * 20 + [5.0] * 20) == [Change(20, 5.0, 6.0), Change(40, 6.0, 5.0)]
    assert find([5.0] * 60) == [] and find([]) == [] and find([1.0, 2.0] * 5) == []


def test_too_few_measurements_have_no_changes() -> None:
    step = [1.0] * 6 + [2.0] * 7
    assert find(step) == [] and find([1.0, *step]) != []


def test_long_series_are_examined_from_their_end() -> None:
    series = [1.0] * 1000 + [2.0] * 100
    assert find(series) == [Change(1000, 1.0, 2.0)] and find(series[::-1]) == []


def test_without_the_threshold_noise_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_points, "_threshold", lambda count: 2.0)
    assert sum(bool(find(_noise(seed, 40).tolist())) for seed in range(100)) > 30
