"""The measuring loop of one rank, as nccl-tests does it: warm up, meet, time the calls back to back, check apart.

Checks run in calls of their own, on fresh data, with outputs poisoned first. In place, an all-gather's input is its
rank's own row of the output; broadcast and reduce are always in place, an all-to-all never is. Another library's call
is timed and checked the same way, in the one place that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tricomm import Communicator
from tricomm.errors import ResourceError
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.perf import units
from tricomm.perf.bench import check_data, collective_calls, timing
from tricomm.perf.bench.baselines import Baselines, Implementation
from tricomm.perf.bench.collective_calls import Unavailable
from tricomm.perf.bench.request import Case, Settings
from tricomm.perf.bench_row import OURS, PLACES

Note = Callable[[str], None]


@dataclass
class Bench:
    """What every row of this rank is measured with; `number` counts calls, so that no two have the same data."""

    comm: Communicator
    settings: Settings
    others: Baselines
    note: Note
    number: int = 0
    said: set[str] = field(default_factory=set)

    def skip(self, why: str) -> None:
        """Say, once, what cannot be compared."""
        if why not in self.said:
            self.said.add(why)
            self.note(why)

    def next_call(self) -> int:
        """The number of a check, of which there are two."""
        self.number += 2
        return self.number


def measure(comm: Communicator, settings: Settings, others: Baselines, note: Note) -> Iterator[dict[str, Any]]:
    """One record per case, size and mode: this rank's microseconds per call and its number of wrong elements.

    `note` is told what a library cannot do here. Raises `ResourceError` for a mode that this device has not.
    """
    for mode in settings.modes:
        timing.check_mode(mode, comm.simulated)
    bench = Bench(comm, settings, others, note)
    for case in settings.cases:
        for size in settings.sizes:
            for mode in settings.modes:
                if case.library == OURS:
                    yield _ours(bench, case, size, mode)
                else:
                    yield from _theirs(bench, case, size, mode)


def _row(bench: Bench, case: Case, size: int, mode: str) -> dict[str, Any]:
    item, world_size = getattr(torch, case.dtype).itemsize, bench.comm.world_size
    elements = units.row_elements(case.collective, size, item, world_size)
    return {
        "library": case.library,
        "collective": case.collective,
        "mode": mode,
        "size_bytes": units.total_bytes(case.collective, elements, item, world_size),
        "input_bytes": units.input_bytes(case.collective, elements, item, world_size),
        "count": elements,
        "dtype": case.dtype,
        "op": bench.settings.op if COLLECTIVES[case.collective].reduces else "none",
        **dict.fromkeys(PLACES),
    }


def _ours(bench: Bench, case: Case, size: int, mode: str) -> dict[str, Any]:
    comm, row = bench.comm, _row(bench, case, size, mode)
    choice = comm.explain(
        case.collective, nbytes=row["input_bytes"], dtype=getattr(torch, case.dtype), op=bench.settings.op,
        algorithm=case.algorithm, protocol=case.protocol, mode="eager" if mode == "eager" else "graph",
    )  # fmt: skip
    kernel = registry.find(case.collective, choice.algorithm, choice.protocol)
    row |= {
        "algorithm": choice.algorithm,
        "protocol": choice.protocol,
        "reason": choice.reason,
        "blocks": choice.blocks,
        "warps": choice.warps,
        "tile_words": choice.block,
        "moved_bytes": float(units.moved(kernel, comm.world_size) * row["input_bytes"]),
        "least_bytes": float(units.least(case.collective, comm.world_size) * row["input_bytes"]),
        "hops": kernel.hops,
        "barriers": kernel.barriers,
    }
    for place in PLACES:
        row[place] = _place(bench, case, row["count"], place, mode)
    return row


def _theirs(bench: Bench, case: Case, size: int, mode: str) -> Iterator[dict[str, Any]]:
    if COLLECTIVES[case.collective].reduces and bench.settings.op != "sum":
        return bench.skip(f"{case.library}: sums alone are compared, not {bench.settings.op}")
    place = "in_place" if case.collective in ("all_reduce", "broadcast", "reduce") else "out_of_place"
    for name, how in bench.others.offered(case.library, case.collective).items():
        row = _row(bench, case, size, mode) | {"algorithm": name, "protocol": "-"}
        try:
            contender = bench.others.make(how, case.collective, getattr(torch, case.dtype), row["count"])
            row[place] = _contender(bench, case, row["count"], contender, mode)
        except Unavailable as why:
            bench.skip(str(why))
        except (RuntimeError, TypeError, ValueError) as error:  # what torch raises for a type that a library lacks
            bench.skip(f"{name}: no {case.collective} of {case.dtype} here: {str(error).splitlines()[0]}")
        else:
            yield row


def _contender(bench: Bench, case: Case, elements: int, contender: Implementation, mode: str) -> dict[str, Any]:
    comm, dtype = bench.comm, getattr(torch, case.dtype)
    facts = (case.collective, "sum", comm.world_size)

    def check(number: int) -> int:
        this_call = number * comm.world_size  # whose root is rank 0
        contender.load(check_data.values(*facts, comm.rank, this_call, elements, dtype).to(comm.device))
        result = contender.run()
        comm.synchronize()
        if result is None or not check_data.gets(case.collective, comm.world_size, comm.rank, this_call):
            return 0
        return check_data.wrong(result, check_data.expected(*facts, this_call, elements, comm.rank, dtype))

    contender.load(torch.zeros(elements * COLLECTIVES[case.collective].rows_in(comm.world_size), dtype=dtype))
    times = _timed(bench, contender.run, mode)
    return times | {"wrong": check(bench.next_call()) if bench.settings.check else None}


def _tensors(comm: Communicator, dtype: torch.dtype, case: Case, elements: int, place: str) -> tuple[Any, Any]:
    """Input and output; in place, the one with fewer rows is this rank's row of the other."""
    kind = COLLECTIVES[case.collective]
    rows_in, rows_out = kind.rows_in(comm.world_size), kind.rows_out(comm.world_size)
    if check_data.in_place(case.collective) or (place == "in_place" and rows_in == rows_out == 1):
        x = torch.empty(elements, dtype=dtype, device=comm.device)
        return x, x
    whole = torch.empty(elements * max(rows_in, rows_out), dtype=dtype, device=comm.device)
    if rows_in == rows_out or place == "out_of_place":
        other = torch.empty(elements * min(rows_in, rows_out), dtype=dtype, device=comm.device)
    else:
        other = whole[comm.rank * elements :][:elements]
    return (whole, other) if rows_in > rows_out else (other, whole)


def _place(bench: Bench, case: Case, elements: int, place: str, mode: str) -> dict[str, Any]:
    comm, settings = bench.comm, bench.settings
    dtype, world_size = getattr(torch, case.dtype), comm.world_size
    x, y = _tensors(comm, dtype, case, elements, place)

    def call(this_call: int) -> None:
        collective_calls.call(comm, case.collective, this_call, x, y, case, settings.op)

    def check(this_call: int) -> int:
        facts = (case.collective, settings.op, world_size)
        check_data.poison(y)
        x.copy_(check_data.values(*facts, comm.rank, this_call, elements, dtype))
        call(this_call)
        comm.synchronize()
        if not check_data.gets(case.collective, world_size, comm.rank, this_call):
            return 0
        return check_data.wrong(y, check_data.expected(*facts, this_call, elements, comm.rank, dtype))

    x.zero_()
    times = _timed(bench, lambda: call(0), mode)
    number = bench.next_call()
    # Twice: the two calls use different mailboxes.
    return times | {"wrong": check(number) + check(number + 1) if settings.check else None}


def _timed(bench: Bench, call: timing.Call, mode: str) -> dict[str, float]:
    run, calls = timing.prepare(bench.comm, call, mode, bench.settings.warmup)
    return timing.summary(timing.timed(bench.comm, run, calls, bench.settings.iters))


def pick_device(name: str, rank: int) -> torch.device:
    """The device of a rank: a GPU of its own, or a shared one, unless `name` is cpu. Raises `ResourceError`."""
    gpus = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if gpus:
        return torch.device("cuda", rank % gpus)
    if name == "cuda":
        raise ResourceError("device 'cuda': this process sees no CUDA device; use --device cpu")
    return torch.device("cpu")
