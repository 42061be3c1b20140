"""Limits of time in GPU tests, without a GPU."""

import pytest

from tests import ranks
from tests.gpu import gpu_limits


@pytest.mark.parametrize("slowest", [0.001, 0.25])
def test_limits_grow_with_the_time_that_two_processes_take_to_meet(slowest, monkeypatch):
    asked = []

    def run(world_size, body, url, timeout):
        asked.append((world_size, body))
        return [slowest / 2, slowest]

    monkeypatch.setattr(ranks, "run", run)
    gpu_limits.meeting_seconds.cache_clear()
    try:
        assert gpu_limits.within(2.0) == 2.0 + 50 * slowest and gpu_limits.within(1.0, 4) == 1.0 + 4 * slowest
    finally:
        gpu_limits.meeting_seconds.cache_clear()
    assert asked == [(2, gpu_limits._meet)]  # measured once
