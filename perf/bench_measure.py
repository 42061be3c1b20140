"""The measuring loop of one rank, as nccl-tests does it: warm up, meet, time the calls back to back, check apart.

Checks run in calls of their own, on fresh data, with outputs poisoned first. In place, an all-gather's input is its
rank's own row of the output; broadcast and reduce are always in place, an all-to-all never is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tricomm import Communicator
from tricomm.errors import ResourceError
from tricomm.kernels.collectives import COLLECTIVES
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
    rows = COLLECTIVES[case.collective].rows_in(comm.world_size)
    choice = comm.explain(
        case.collective, nbytes=rows * elements * item, dtype=getattr(torch, settings.dtype), op=settings.op,
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
        "op": settings.op if COLLECTIVES[case.collective].reduces else "none",
    }


def _tensors(comm: Communicator, dtype: torch.dtype, case: Case, elements: int, place: str) -> tuple[Any, Any]:
    """Input and output; in place, the one with fewer rows is this rank's row of the other."""
    kind = COLLECTIVES[case.collective]
    rows_in, rows_out = kind.rows_in(comm.world_size), kind.rows_out(comm.world_size)
    if bench_data.in_place(case.collective) or (place == "in_place" and rows_in == rows_out == 1):
        x = torch.empty(elements, dtype=dtype, device=comm.device)
        return x, x
    whole = torch.empty(elements * max(rows_in, rows_out), dtype=dtype, device=comm.device)
    if rows_in == rows_out or place == "out_of_place":
        other = torch.empty(elements * min(rows_in, rows_out), dtype=dtype, device=comm.device)
    else:
        other = whole[comm.rank * elements :][:elements]
    return (whole, other) if rows_in > rows_out else (other, whole)


def _place(
    comm: Communicator, settings: Settings, case: Case, elements: int, place: str, number: int
) -> dict[str, Any]:
    dtype, world_size = getattr(torch, settings.dtype), comm.world_size
    x, y = _tensors(comm, dtype, case, elements, place)
    method = getattr(comm, case.collective)
    how = {"algorithm": case.algorithm, "protocol": case.protocol}

    def call(this_call: int) -> None:
        gets = bench_data.gets(case.collective, world_size, comm.rank, this_call)
        out = {"out": y} if gets and not bench_data.in_place(case.collective) else {}
        method(x, **out, **how, **bench_data.options(case.collective, settings.op, world_size, this_call, elements))

    def check(this_call: int) -> int:
        facts = (case.collective, settings.op, world_size)
        bench_data.poison(y)
        x.copy_(bench_data.values(*facts, comm.rank, this_call, elements, dtype))
        call(this_call)
        comm.synchronize()
        if not bench_data.gets(case.collective, world_size, comm.rank, this_call):
            return 0
        return bench_data.wrong(y, bench_data.expected(*facts, this_call, elements, comm.rank, dtype))

    x.zero_()
    microseconds = _time(comm, lambda: call(0), settings)
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
