"""Times of calls: quantiles on each rank, and the slowest rank of each."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.gpu_limits import stopwatch
from tricomm.errors import ResourceError
from tricomm.perf.bench import timing

_samples = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=300)


@given(_samples, st.floats(0.01, 1.0))
def test_a_quantile_is_a_sample_that_the_given_share_does_not_exceed(samples: list[float], part: float) -> None:
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


def test_a_graph_holds_all_calls_and_is_replayed(monkeypatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: log.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **more: log.append(more) or nullcontext())
    replay = timing.capture(lambda: log.append("call") or len(log), 3, "stream")
    assert log == [{"stream": "stream", "capture_error_mode": "thread_local"}, "call", "call", "call"]
    assert replay() == 4 and log[-1] == "replay"


def test_a_gpu_is_timed_by_events(monkeypatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = stopwatch(torch.device("cuda", 3))
    assert clock() == 2000.0 and log == ["record", "record", "wait"]
