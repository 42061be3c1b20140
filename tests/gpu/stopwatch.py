"""Microseconds of one stretch of work, on a GPU or on the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Gives microseconds from here, by events on a GPU's current stream, which it waits for, or by the host's clock."""
    if device.type == "cpu":
        start = time.perf_counter()
        return lambda: (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()

    def elapsed() -> float:
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return elapsed
