"""Times of calls and of ranks: quantiles by rank, ranks put together by the slowest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tricomm.errors import ResourceError
from tricomm.perf.bench import timing

_samples = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=300)


@given(_samples, st.floats(0.01, 1.0))
def test_a_quantile_is_a_sample_that_so_many_do_not_exceed(samples: list[float], part: float) -> None:
    value = timing.quantile(samples, part)
    assert value in samples
    assert sum(s <= value for s in samples) >= part * len(samples)
    assert sum(s < value for s in samples) < part * len(samples)


@given(st.lists(_samples, min_size=1, max_size=8))
def test_the_slowest_rank_decides(ranks: list[list[float]]) -> None:
    parts = [timing.summary(samples) for samples in ranks]
    times = timing.over_ranks(parts)
    for name in ("time_us", "p50_us", "p99_us", "max_us"):
        assert times[name] == max(part[name] for part in parts)
    assert times["p50_us"] <= times["p99_us"] <= times["max_us"] and times["skew_us"] >= 0
    assert parts[times["slowest_rank"]]["p50_us"] == times["p50_us"]
    if len(set(map(tuple, ranks))) == 1:
        assert times["skew_us"] == 0


def test_graphs_need_a_gpu() -> None:
    timing.check_mode("eager", simulated=True)
    timing.check_mode("kernel", simulated=False)
    with pytest.raises(ResourceError, match="mode 'kernel' needs CUDA graphs"):
        timing.check_mode("kernel", simulated=True)
