"""The measuring loop of one rank, as nccl-tests does it: warm up, meet, time the calls back to back, check apart.

Checks run in calls of their own, on fresh data, with outputs poisoned first. In place, an all-gather's input is its
rank's own row of the output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tricomm import Communicator
from tricomm.errors import ResourceError
from tricomm.perf import bench_data
from tricomm.perf.bench_plan import Case, Settings, count, total_bytes

PLACES = ("out_of_place", "in_place")
Call = Callable[[], Any]


def measure(comm: Communicator, settings: Settings) -> Iterator[dict[str, Any]]:
    """One record per case and size: this rank's microseconds per call and its number of wrong elements."""
    number = 0
    for case in settings.cases:
        for size in settings.sizes:
            row = _describe(comm, settings, case, size)
            for place in PLACES:
                number += 2
                row[place] = _place(comm, settings, case, row["count"], place, number)
            yield row


def _describe(comm: Communicator, settings: Settings, case: Case, size: int) -> dict[str, Any]:
    item = getattr(torch, settings.dtype).itemsize
    elements = count(case.collective, size, item, comm.world_size)
    choice = comm.explain(
        case.collective, nbytes=elements * item, dtype=getattr(torch, settings.dtype), op=settings.op,
        algorithm=case.algorithm, protocol=case.protocol,
    )  # fmt: skip
    return {
        "collective": case.collective,
        "algorithm": choice.algorithm,
        "protocol": choice.protocol,
        "reason": choice.reason,
        "blocks": choice.blocks,
        "warps": choice.warps,
        "tile_words": choice.block,
        "size_bytes": total_bytes(case.collective, elements, item, comm.world_size),
        "count": elements,
        "dtype": settings.dtype,
        "op": settings.op if case.collective == "all_reduce" else "none",
    }


def _tensors(comm: Communicator, dtype: torch.dtype, elements: int, rows: int, place: str) -> tuple[Any, Any]:
    y = torch.empty(elements * rows, dtype=dtype, device=comm.device)
    row = comm.rank if rows > 1 else 0
    return (y[row * elements :][:elements] if place == "in_place" else torch.empty_like(y[:elements])), y


def _place(
    comm: Communicator, settings: Settings, case: Case, elements: int, place: str, number: int
) -> dict[str, Any]:
    gathers = case.collective == "all_gather"
    rows = comm.world_size if gathers else 1
    x, y = _tensors(comm, getattr(torch, settings.dtype), elements, rows, place)

    def call() -> None:
        if gathers:
            comm.all_gather(x, out=y, algorithm=case.algorithm, protocol=case.protocol)
        else:
            comm.all_reduce(x, settings.op, out=y, algorithm=case.algorithm, protocol=case.protocol)

    def check(this_call: int) -> int:
        facts = (case.collective, settings.op, comm.world_size)
        bench_data.poison(y)
        x.copy_(bench_data.values(*facts, comm.rank, this_call, elements))
        call()
        comm.synchronize()
        return bench_data.wrong(y, bench_data.expected(*facts, this_call, elements))

    x.zero_()
    microseconds = _time(comm, call, settings)
    # Twice: the two calls use different mailboxes.
    return {"time_us": microseconds, "wrong": check(number) + check(number + 1) if settings.check else None}


def _time(comm: Communicator, call: Call, settings: Settings) -> float:
    for _ in range(settings.warmup):
        call()
    comm.synchronize()
    comm.barrier()
    start = time.perf_counter()
    for _ in range(settings.iters):
        call()
    comm.synchronize()
    return (time.perf_counter() - start) / settings.iters * 1e6


def pick_device(name: str, rank: int) -> torch.device:
    """The device of a rank: a GPU of its own, or a shared one, unless `name` is cpu. Raises `ResourceError`."""
    gpus = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if gpus:
        return torch.device("cuda", rank % gpus)
    if name == "cuda":
        raise ResourceError("device 'cuda': this process sees no CUDA device; use --device cpu")
    return torch.device("cpu")
