"""One rank of the stage `processes`, a process of its own (see `tricomm.perf.ranks`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tricomm
from tricomm import Communicator
from tricomm.kernels import layout, registry
from tricomm.kernels.registry import Kernel
from tricomm.perf import bench_data
from tricomm.perf.evidence import checks, machine
from tricomm.perf.evidence.stage import Settings
from tricomm.perf.ranks import speak

# The next epoch or the one after it: a signed counter of 32 bits ends, an unsigned one does, a mailbox is cleared.
_EDGES = ((1 << 31) - 2, (1 << 32) - 3, layout.CLEAR_EVERY - 1, 2 * layout.CLEAR_EVERY - 2)
_DTYPE = torch.float32


def main(say: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Do the task and say what was wrong, how memory was shared, and how many calls were made."""
    torch.set_num_threads(1)
    task = {"sweep": sweep, "graphs": graphs, "epochs": epochs, "two groups": two_groups}[data["task"]]
    device = machine.rank_device(Settings(Path(), dry_run=data["dry_run"]), rank, data.get("one_gpu", True))
    if device != "cpu":
        torch.cuda.set_device(device)

    def join(name: str = "", **more: Any) -> Communicator:
        options = replace(checks.options(data["dry_run"]), **more)
        return tricomm.init(url + name, rank, world_size, device, options=options)

    kernel = next((k for k in registry.KERNELS if k.name == data["kernel"]), registry.KERNELS[0])
    kind, calls, wrong = task(join, kernel, data["dry_run"])
    say("checked", wrong=wrong, kind=kind, calls=calls)


Found = tuple[str, int, list[str]]  # kind of arena, calls, what was wrong


def sweep(join: Callable[..., Communicator], kernel: Kernel, dry_run: bool) -> Found:
    """Every type and operation."""
    wrong, calls = [], 0
    with join() as comm:
        for name in checks.dtypes(dry_run)[: 1 if kernel.collective == "barrier" else None]:
            wanted = checks.calls(kernel, comm.world_size, dry_run)
            wrong += [f"{name}: {text}" for text in checks.wrong(comm, kernel, getattr(torch, name), wanted)]
            calls += len(wanted)
        return comm.kind, calls, wrong


def epochs(join: Callable[..., Communicator], kernel: Kernel, dry_run: bool) -> Found:
    """Calls across the ends of the counters."""
    wrong, calls = [], 0
    for number, first in enumerate(_EDGES[:2] if dry_run else _EDGES):
        with join(f"-{number}", first_epoch=first) as comm:
            wanted = checks.calls(kernel, comm.world_size, True) * 2
            wrong += [f"from epoch {first}: {text}" for text in checks.wrong(comm, kernel, _DTYPE, wanted)]
            calls += len(wanted)
            kind = comm.kind
    return kind, calls, wrong


def two_groups(join: Callable[..., Communicator], kernel: Kernel, dry_run: bool) -> Found:
    """Two communicators of the same ranks, call by call in turns, with other kernels."""
    wrong, calls = [], 0
    with join("-one") as one, join("-two") as two:
        for turn, kernel in enumerate(registry.KERNELS * (1 if dry_run else 5)):
            for comm in (one, two) if turn % 2 else (two, one):
                wanted = checks.calls(kernel, comm.world_size, True)[:2]
                wrong += checks.wrong(comm, kernel, _DTYPE, wanted)
                calls += len(wanted)
        return one.kind, calls, wrong


def graphs(join: Callable[..., Communicator], kernel: Kernel, dry_run: bool) -> Found:
    """1,000 replays of a CUDA graph of two calls, mixed with eager calls; without a GPU the calls themselves."""
    with join() as comm:
        replays, count, wrong = 2 if dry_run else 1000, 37 if dry_run else 1000, 0
        rows = 1 if kernel.reduces else comm.world_size
        x = torch.zeros(count, dtype=_DTYPE, device=comm.device)
        y = torch.zeros(count * rows, dtype=_DTYPE, device=comm.device)
        how = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}

        def call() -> None:
            if kernel.collective == "barrier":
                comm.barrier(async_op=True)
            else:
                getattr(comm, kernel.collective)(x, out=y, **how)

        stream = torch.cuda.Stream() if not dry_run else None
        with torch.cuda.stream(stream):
            call()
            comm.synchronize()
            replay = _captured(call, stream)
            for turn in range(replays):
                x.copy_(bench_data.values(kernel.collective, "sum", comm.world_size, comm.rank, turn, count))
                replay()
                if turn % 7 == 3:
                    call()
                if kernel.collective != "barrier" and (turn % 50 == 0 or turn == replays - 1):
                    comm.synchronize()
                    exact = bench_data.expected(kernel.collective, "sum", comm.world_size, turn, count)
                    wrong += bench_data.wrong(y, exact)
            comm.synchronize()
        return comm.kind, 2 * replays, [f"{wrong} elements are wrong"] if wrong else []


def _captured(call: Callable[[], None], stream: Any) -> Callable[[], None]:
    if stream is None:

        def twice() -> None:
            call()
            call()

        return twice
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
        call()
    return graph.replay


if __name__ == "__main__":
    sys.exit(speak(main))
