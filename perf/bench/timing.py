"""Times of consecutive calls, as users make them, and the summary of all ranks' times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tricomm import Communicator
from tricomm.errors import ResourceError

Call = Callable[[], Any]
CALLS_PER_GRAPH = 20  # of mode `kernel`: they share the cost of the graph's launch


def check_mode(mode: str, simulated: bool) -> None:
    """Raises `ResourceError` for a mode that a CPU does not have."""
    if simulated and mode != "eager":
        raise ResourceError(f"mode {mode!r} needs CUDA graphs, and these ranks run on a CPU; use --mode eager")


def prepare(comm: Communicator, call: Call, mode: str, warmup: int) -> tuple[Call, int]:
    """The function to time in `mode`, warmed up, and the number of calls that it makes. Called by all ranks
    together."""
    for _ in range(max(warmup, mode != "eager")):  # a kernel has to be compiled and loaded before the capture
        call()
    comm.synchronize()
    if mode == "eager":
        return call, 1
    calls = CALLS_PER_GRAPH if mode == "kernel" else 1
    replay = capture(call, calls)
    replay()
    comm.synchronize()
    return replay, calls


def repeated(call: Call, calls: int) -> Call:
    """`calls` calls, one after another; returns the result of the last one."""

    def many() -> Any:
        result = None
        for _ in range(calls):
            result = call()
        return result

    return many


def capture(call: Call, calls: int = 1, stream: Any = None) -> Call:
    """A function that replays a CUDA graph of `calls` calls and returns the result of the last captured call.

    `stream` is the one to capture on; None takes one that torch keeps for captures.
    """
    graph = torch.cuda.CUDAGraph()
    # Calls by a library's threads must not invalidate the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = repeated(call, calls)()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def timed(comm: Communicator, run: Call, calls: int, iters: int) -> list[float]:
    """Microseconds a call, for each of `iters` runs of `calls` calls, after a barrier of all ranks.

    On a GPU the host does not wait between the runs, which follow each other on the stream and are separated by events.
    The events may prevent the overlap of dependent launches, so only calls inside a run of mode `kernel` overlap.
    """
    comm.barrier()
    marks = _on_cpu(run, iters) if comm.simulated else _on_gpu(comm, run, iters)
    return [us / calls for us in marks]


def _on_cpu(run: Call, iters: int) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(iters):
        run()
        marks.append(time.perf_counter())
    return [(end - begin) * 1e6 for begin, end in zip(marks, marks[1:], strict=False)]


def _on_gpu(comm: Communicator, run: Call, iters: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iters + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    comm.synchronize()
    torch.cuda.synchronize(comm.device)  # the communicator does not know calls of other libraries
    return [begin.elapsed_time(end) * 1e3 for begin, end in zip(marks, marks[1:], strict=False)]


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that is not exceeded by the fraction `part` of all values (nearest rank)."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def summary(samples: Sequence[float]) -> dict[str, float]:
    """One rank's times of a row, in microseconds: `time_us` is the mean, as nccl-tests has it."""
    return {
        "time_us": sum(samples) / len(samples),
        "p50_us": quantile(samples, 0.5),
        "p99_us": quantile(samples, 0.99),
        "max_us": max(samples),
    }


def over_ranks(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One summary of all ranks: the slowest rank's times, the average of the means, the range of the medians."""
    largest: dict[str, Any] = {name: max(part[name] for part in parts) for name in ("p50_us", "p99_us", "max_us")}
    times, medians = [part["time_us"] for part in parts], [part["p50_us"] for part in parts]
    return {
        "time_us": max(times),
        "avg_us": sum(times) / len(times),
        **largest,
        "skew_us": max(medians) - min(medians),
        "slowest_rank": medians.index(max(medians)),
    }
