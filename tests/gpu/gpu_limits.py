"""The time that two processes on one GPU take for a rendezvous, from which GPU tests compute their limits.

Without MPS the processes take turns on the GPU in slices of time, some 2 ms or some tens of them, and a rendezvous of
ranks takes several slices. So a limit is not a constant, but some seconds plus a number of rendezvous.
"""

import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

import tricomm
from tests import ranks

_MEETINGS = 30


@cache
def meeting_seconds() -> float:
    """The longest of 30 barriers of two processes on `cuda:0`, in seconds. Measured once a test run."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        return max(ranks.run(2, _meet, f"file://{folder}/store", timeout=200))


def within(seconds: float, meetings: int = 50) -> float:
    """A time limit: `seconds` on an idle GPU, plus the measured time of `meetings` barriers on this one."""
    return seconds + meetings * meeting_seconds()


def _meet(rank: int, world_size: int, tell: object, url: str) -> float:
    options = tricomm.Options(timeout=60.0, arena_bytes=4 << 20, share_device=True)
    with tricomm.init(url, rank, world_size, "cuda:0", options=options) as comm:
        comm.barrier()
        took = []
        for _ in range(_MEETINGS):
            began = time.monotonic()
            comm.barrier()
            torch.cuda.synchronize()
            took.append(time.monotonic() - began)
        return max(took)


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
