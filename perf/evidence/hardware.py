"""The hardware of a run: a GPU, or in a dry run a CPU, on which the same code runs with simulated ranks.

Ranks of one process are streams of one GPU (`tricomm.local`) or tasks under Triton's interpreter (`tricomm.simulate`).
Ranks that are processes are run by `tricomm.perf.workers`, on the device of `begin_rank`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

import tricomm
from tricomm import Communicator, Options
from tricomm.perf.bench import timing
from tricomm.perf.evidence.stage import EvidenceSettings

OfRank = Callable[[Communicator], Any]
MakeRun = Callable[[Communicator], timing.Call]


class CurrentGpu:
    """The current CUDA device; `device` is the device of a case's tensors."""

    simulated = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def together(self, world_size: int, of_rank: OfRank, options: Options) -> list[Any]:
        """Results of `of_rank(comm)` for all ranks, in this process. It may wait for its own calls only."""

        def rank(comm: Communicator) -> Any:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(comm.stream):
                result = of_rank(comm)
                comm.synchronize()
            return result

        with ExitStack() as undo:
            comms = [undo.enter_context(c) for c in tricomm.local(world_size, self.device, options=options)]
            with ThreadPoolExecutor(world_size) as threads:
                return list(threads.map(rank, comms))

    def resident(self, world_size: int, make_run: MakeRun, calls: int, rounds: int, options: Options) -> list[float]:
        """Microseconds a call of the slowest rank, one number a round. `make_run(comm)` makes a rank's call, which is
        `calls` times in a graph; the graphs of all ranks, which are streams of one process, are replayed together."""
        with ExitStack() as undo:
            comms = [undo.enter_context(c) for c in tricomm.local(world_size, self.device, options=options)]
            runs = [make_run(comm) for comm in comms]
            for comm, run in zip(comms, runs, strict=True):  # compiled and loaded before a kernel waits
                with torch.cuda.stream(comm.stream):
                    run()
            self._synchronize(comms)
            graphs = [timing.capture(run, calls, comm.stream) for comm, run in zip(comms, runs, strict=True)]
            times = []
            for _ in range(rounds + 1):
                marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in comms]
                for comm, replay, (begin, end) in zip(comms, graphs, marks, strict=True):
                    with torch.cuda.stream(comm.stream):
                        begin.record()
                        replay()
                        end.record()
                self._synchronize(comms)
                times.append(max(begin.elapsed_time(end) for begin, end in marks) * 1e3 / calls)
            return times[1:]

    def _synchronize(self, comms: list[Communicator]) -> None:
        for comm in comms:
            with torch.cuda.stream(comm.stream):
                comm.synchronize()

    def times(self, run: timing.Call, calls: int, rounds: int) -> list[float]:
        """The same for a call that needs no other rank."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        replay = timing.capture(run, calls, stream)
        times = []
        with torch.cuda.stream(stream):
            for _ in range(rounds + 1):
                elapsed = timing.stopwatch(self.device)
                replay()
                times.append(elapsed() / calls)
        return times[1:]


class DryRun:
    """No GPU: every line of a stage runs, and its measurements mean nothing."""

    simulated = True
    device = torch.device("cpu")

    def together(self, world_size: int, of_rank: OfRank, options: Options) -> list[Any]:
        return tricomm.simulate(of_rank, world_size, options=options)

    def resident(self, world_size: int, make_run: MakeRun, calls: int, rounds: int, options: Options) -> list[float]:
        def rank(comm: Communicator) -> list[float]:
            run = make_run(comm)
            return [_clocked(run) for _ in range(rounds)]

        return [max(times) for times in zip(*self.together(world_size, rank, options), strict=True)]

    def times(self, run: timing.Call, calls: int, rounds: int) -> list[float]:
        return [_clocked(run) for _ in range(rounds)]


def _clocked(run: timing.Call) -> float:
    elapsed = timing.stopwatch(DryRun.device)
    run()
    return elapsed()


def of(settings: EvidenceSettings) -> CurrentGpu | DryRun:
    """The hardware of a run."""
    return DryRun() if settings.dry_run else CurrentGpu()


def no_gpu(settings: EvidenceSettings) -> str | None:
    """Why a stage that needs a GPU cannot run, or None."""
    if settings.dry_run or torch.cuda.is_available():
        return None
    return "no CUDA device is visible to this process; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --dry-run"


def capability(settings: EvidenceSettings) -> int:
    """The compute capability for which kernels are compiled, 90 for sm_90. Makes no context on the device."""
    major, minor = (9, 0) if settings.dry_run else torch.cuda.get_device_capability()
    return 10 * major + minor


def begin_rank(rank: int, data: dict[str, Any]) -> str:
    """In a rank that is a process of its own: its device, which is the current one from here on.

    `data` are the settings of the ranks: a CPU in a `dry_run`, else the first GPU for all, or one for each unless
    `one_gpu`.
    """
    torch.set_num_threads(1)
    if data["dry_run"]:
        return "cpu"
    index = 0 if data.get("one_gpu", True) else rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def spread(samples: list[float]) -> dict[str, Any]:
    """Median, and 10th and 90th percentile, of times in microseconds."""
    ordered = sorted(samples)
    low, high = (ordered[min(len(ordered) - 1, int(len(ordered) * at))] for at in (0.1, 0.9))
    times = {"median_us": median(ordered), "p10_us": low, "p90_us": high}
    return {**{name: round(us, 3) for name, us in times.items()}, "samples": len(ordered)}
