"""What stages run on: a GPU, or in a dry run a CPU that goes through the same code with simulated ranks.

Ranks of one process are streams of one GPU (`tricomm.local`) or tasks under Triton's interpreter
(`tricomm.simulate`). Ranks as processes are started by `tricomm.perf.workers`, on `rank_device`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Any, Protocol

import torch

import tricomm
from tricomm import Communicator, Options
from tricomm.perf.bench import timing
from tricomm.perf.evidence.stage import Settings

Fn = Callable[[Communicator], Any]
Make = Callable[[Communicator], Callable[[], None]]


class Machine(Protocol):
    """`device` is where tensors of a case belong."""

    simulated: bool
    device: torch.device

    def together(self, world_size: int, fn: Fn, options: Options) -> list[Any]:
        """`fn(comm)` of every rank, all in this process; their results. `fn` may wait for its own calls only."""

    def resident(self, world_size: int, make: Make, calls: int, rounds: int, options: Options) -> list[float]:
        """Microseconds a call, one number a round: `make(comm)` gives what a rank calls, `calls` times in a graph; the
        graphs of all ranks, which are streams of one process, are replayed together. The slowest rank counts."""

    def times(self, run: Callable[[], None], calls: int, rounds: int) -> list[float]:
        """The same for something that needs no other rank."""


class Gpu:
    """The current CUDA device."""

    simulated = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def together(self, world_size: int, fn: Fn, options: Options) -> list[Any]:
        def rank(comm: Communicator) -> Any:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(comm.stream):
                result = fn(comm)
                comm.synchronize()
            return result

        with ExitStack() as undo:
            comms = [undo.enter_context(c) for c in tricomm.local(world_size, self.device, options=options)]
            with ThreadPoolExecutor(world_size) as threads:
                return list(threads.map(rank, comms))

    def resident(self, world_size: int, make: Make, calls: int, rounds: int, options: Options) -> list[float]:
        with ExitStack() as undo:
            comms = [undo.enter_context(c) for c in tricomm.local(world_size, self.device, options=options)]
            runs = [make(comm) for comm in comms]
            for comm, run in zip(comms, runs, strict=True):  # compiled and loaded before anything waits
                with torch.cuda.stream(comm.stream):
                    run()
            self._settle(comms)
            graphs = [timing.capture(run, calls, comm.stream) for comm, run in zip(comms, runs, strict=True)]
            found = []
            for _ in range(rounds + 1):
                marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in comms]
                for comm, replay, (begin, end) in zip(comms, graphs, marks, strict=True):
                    with torch.cuda.stream(comm.stream):
                        begin.record()
                        replay()
                        end.record()
                self._settle(comms)
                found.append(max(begin.elapsed_time(end) for begin, end in marks) * 1e3 / calls)
            return found[1:]

    def _settle(self, comms: list[Communicator]) -> None:
        for comm in comms:
            with torch.cuda.stream(comm.stream):
                comm.synchronize()

    def times(self, run: Callable[[], None], calls: int, rounds: int) -> list[float]:
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        replay = timing.capture(run, calls, stream)
        found = []
        with torch.cuda.stream(stream):
            for _ in range(rounds + 1):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                replay()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) * 1e3 / calls)
        return found[1:]


class Dry:
    """No GPU: every line of a stage runs, and what it measures means nothing."""

    simulated = True
    device = torch.device("cpu")

    def together(self, world_size: int, fn: Fn, options: Options) -> list[Any]:
        return tricomm.simulate(fn, world_size, options=options)

    def resident(self, world_size: int, make: Make, calls: int, rounds: int, options: Options) -> list[float]:
        def rank(comm: Communicator) -> list[float]:
            run = make(comm)
            return [_clocked(run) for _ in range(rounds)]

        return [max(times) for times in zip(*self.together(world_size, rank, options), strict=True)]

    def times(self, run: Callable[[], None], calls: int, rounds: int) -> list[float]:
        return [_clocked(run) for _ in range(rounds)]


def _clocked(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def of(settings: Settings) -> Machine:
    """The machine that a run is for."""
    return Dry() if settings.dry_run else Gpu()


def no_gpu(settings: Settings) -> str | None:
    """Why a stage that needs a GPU cannot run."""
    if settings.dry_run or torch.cuda.is_available():
        return None
    return "no CUDA device is visible to this process; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --dry-run"


def capability(settings: Settings) -> int:
    """90 for sm_90: what kernels are compiled for; asking makes no context on the device."""
    major, minor = (9, 0) if settings.dry_run else torch.cuda.get_device_capability()
    return 10 * major + minor


def rank_device(settings: Settings, rank: int, one_gpu: bool = True) -> str:
    """Where rank `rank` of several processes belongs: all on the first GPU, or each on its own."""
    return "cpu" if settings.dry_run else "cuda:0" if one_gpu else f"cuda:{rank % torch.cuda.device_count()}"


def spread(samples: list[float]) -> dict[str, Any]:
    """Median, and the 10th and 90th of 100, of times in microseconds."""
    ordered = sorted(samples)
    low, high = (ordered[min(len(ordered) - 1, int(len(ordered) * at))] for at in (0.1, 0.9))
    return {"median_us": round(median(ordered), 3), "p10_us": round(low, 3), "p90_us": round(high, 3),
            "samples": len(ordered)}  # fmt: skip
