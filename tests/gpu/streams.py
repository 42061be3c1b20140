"""Ranks that are streams of one process on one GPU: their results, and the times of their calls."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median

import torch

import tricomm
from tests.gpu.gpu_limits import stopwatch
from tricomm.perf.bench import timing

DEVICE = "cuda:0"


def together(world_size, of_rank, options):
    """Results of `of_rank(comm)` for all ranks. It may wait for its own calls only."""

    def rank(comm):
        torch.cuda.set_device(DEVICE)
        with torch.cuda.stream(comm.stream):
            result = of_rank(comm)
            comm.synchronize()
        return result

    with ExitStack() as undo:
        comms = [undo.enter_context(comm) for comm in tricomm.local(world_size, DEVICE, options=options)]
        with ThreadPoolExecutor(world_size) as threads:
            return list(threads.map(rank, comms))


def resident(world_size, make_run, calls, rounds, options):
    """Microseconds a call of the slowest rank, one number a round. `make_run(comm)` makes a rank's call, which is
    `calls` times in a graph; the graphs of all ranks are replayed together."""
    with ExitStack() as undo:
        comms = [undo.enter_context(comm) for comm in tricomm.local(world_size, DEVICE, options=options)]
        runs = [make_run(comm) for comm in comms]
        for comm, run in zip(comms, runs, strict=True):  # compiled and loaded before a kernel waits
            with torch.cuda.stream(comm.stream):
                run()
        _synchronize(comms)
        graphs = [timing.capture(run, calls, comm.stream) for comm, run in zip(comms, runs, strict=True)]
        times = []
        for _ in range(rounds + 1):
            marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in comms]
            for comm, replay, (begin, end) in zip(comms, graphs, marks, strict=True):
                with torch.cuda.stream(comm.stream):
                    begin.record()
                    replay()
                    end.record()
            _synchronize(comms)
            times.append(max(begin.elapsed_time(end) for begin, end in marks) * 1e3 / calls)
        return times[1:]


def alone(run, calls, rounds):
    """The same for a call that needs no other rank."""
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    replay, times = timing.capture(run, calls, stream), []
    with torch.cuda.stream(stream):
        for _ in range(rounds + 1):
            elapsed = stopwatch(torch.device(DEVICE))
            replay()
            times.append(elapsed() / calls)
    return times[1:]


def _synchronize(comms):
    for comm in comms:
        with torch.cuda.stream(comm.stream):
            comm.synchronize()


def spread(samples):
    """Median, and 10th and 90th percentile, of times in microseconds."""
    ordered = sorted(samples)
    low, high = (ordered[min(len(ordered) - 1, int(len(ordered) * at))] for at in (0.1, 0.9))
    return {"median_us": round(median(ordered), 3), "p10_us": round(low, 3), "p90_us": round(high, 3)}
