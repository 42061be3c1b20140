"""One rank of the latency probe of stage `many_gpus`, a process of its own with a GPU of its own.

Two ranks send a word to and fro, the others wait. Half of a round trip is the time from a store on one GPU to the
moment when a poll on the other one sees it.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tricomm
from tricomm import Communicator, Options
from tricomm.perf.evidence import machine
from tricomm.perf.evidence.ping_pong import ping_pong
from tricomm.perf.evidence.stage import Settings
from tricomm.perf.workers import speak

_LANES = 32  # of one warp: a poll of `primitives` spans all threads
_ROOM = 2 * _LANES  # words that a poll of LL words reads
WAYS = ("ll", "flag")


def main(say: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Say, of every pair whose lower rank this is, the microseconds one way."""
    torch.set_num_threads(1)
    device = machine.rank_device(Settings(Path(), dry_run=data["dry_run"]), rank, data.get("one_gpu", False))
    if device != "cpu":
        torch.cuda.set_device(device)
    options = Options(timeout=60.0, arena_bytes=1 << 20, nccl=False)
    with tricomm.init(url, rank, world_size, device, options=options) as comm:
        rooms = {way: comm.symmetric((world_size, _ROOM), torch.int64) for way in WAYS}
        for a, b in itertools.combinations(range(world_size), 2):
            for way in WAYS:
                comm.barrier()
                if rank in (a, b):
                    samples = probe(comm, rooms[way].table, b if rank == a else a, way, data["trips"], data["samples"])
                    if rank == a:
                        say("pair", ranks=[a, b], way=way, samples=samples)
        comm.barrier()


def probe(comm: Communicator, table: torch.Tensor, other: int, way: str, trips: int, samples: int) -> list[float]:
    """Microseconds one way, one number per launch of `trips` round trips; a launch before it brings both together."""
    options = {"LEADS": comm.rank < other, "LL": way == "ll", "ROOM": _ROOM, "LANES": _LANES,
               "PTX": not comm.simulated, "num_warps": 1}  # fmt: skip
    found, first = [], 1
    for _ in range(samples):
        edges = [first, first + -(-trips // 4), first + -(-trips // 4) + trips]
        first = edges[-1]
        bounds = torch.tensor([edges[:2], edges[1:]], dtype=torch.int64, device=comm.device)

        def run(row: torch.Tensor) -> None:
            comm.launch(ping_pong, 1, comm.group_table, table, row, comm.rank, other, **options)

        run(bounds[0])
        clock = _clock(comm)
        run(bounds[1])
        found.append(clock() / trips / 2)
        comm.check()
    return found


def _clock(comm: Communicator) -> Callable[[], float]:
    """Microseconds from here, on the device where there is one."""
    if comm.simulated:
        start = time.perf_counter()
        return lambda: (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()

    def elapsed() -> float:
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return elapsed


if __name__ == "__main__":
    sys.exit(speak(main))
