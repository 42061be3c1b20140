"""A run of `tricomm bench`: its ranks, and their rows put together.

`rank_main` is one rank (see `perf.workers`). A row is complete when every rank has sent it: its time is
the largest of the ranks' times, its wrong elements are their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import tricomm
from tricomm import env, typed_json
from tricomm.errors import ResourceError
from tricomm.perf import provenance
from tricomm.perf.bench.baselines import Baselines, why_not
from tricomm.perf.bench.measure import Note, Rows, measure, pick_device, with_times
from tricomm.perf.bench.request import LIBRARIES, Settings
from tricomm.perf.bench_row import BenchRow, to_json
from tricomm.perf.workers import WorkerMessage, run_workers
from tricomm.store.rendezvous import open_store

_RANK = "tricomm.perf.bench.session:rank_main"
_TIMES = ("time_us", "p50_us", "p99_us", "max_us")  # of a rank


@dataclass
class Results:
    """The header and the complete rows of a run."""

    header: WorkerMessage = field(default_factory=dict)
    rows: list[Rows] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Wrong elements of all rows and ranks."""
        return sum(row.wrong or 0 for rows in self.rows for row in rows)

    def to_json(self, settings: Settings) -> WorkerMessage:
        """The content of the file of `--json`."""
        results = [to_json(rows) for rows in self.rows]
        return {"schema": 1, "header": self.header, "settings": asdict(settings), "results": results}


@dataclass(frozen=True)
class Listener:
    """Called during a run."""

    header: Callable[[WorkerMessage], None]
    row: Callable[[Rows], None]
    note: Note


def run(settings: Settings, world_size: int, listener: Listener, results: Results) -> None:
    """Start `world_size` ranks of this node and collect their rows into `results`, which has only complete rows.

    Raises `RankFailed`, and as `check_libraries`. All ranks have ended when this returns.
    """
    check_libraries(settings)
    parts: dict[int, list[Rows]] = {}
    seen = [0] * world_size
    for rank, message in run_workers(_RANK, world_size, asdict(settings), settings.timeout):
        event = message.pop("event")
        if event == "header" and rank == 0:
            results.header = message
            listener.header(message)
        elif event == "note" and rank == 0:
            listener.note(message["text"])
        elif event == "row":
            ranks = parts.setdefault(seen[rank], [])
            ranks.append(typed_json.convert(message["places"], Rows))
            seen[rank] += 1
            if len(ranks) == world_size:
                results.rows.append(merged(ranks))
                listener.row(results.rows[-1])


def join(settings: Settings, listener: Listener, results: Results) -> None:
    """Be one rank of a group that torchrun has started: every rank gets the merged rows.

    The ranks exchange their times by tricomm's own all-gather; `run` does without it. Raises as `check_libraries`.
    """
    check_libraries(settings)
    with open_group(settings, "env://") as (comm, baselines):
        results.header = provenance.header(comm)
        listener.header(results.header)
        for rows in measure(comm, settings, baselines, listener.note):
            mine = [value for row in rows for value in _numbers(row)]
            gathered = comm.all_gather(torch.tensor(mine, dtype=torch.float64, device=comm.device)).cpu()
            ranks = gathered.reshape(comm.world_size, len(rows), -1).tolist()
            results.rows.append(merged([tuple(map(_with_numbers, rows, numbers)) for numbers in ranks]))
            listener.row(results.rows[-1])
        comm.barrier()


def check_libraries(settings: Settings) -> None:
    """Raise `ResourceError` if `--against` names libraries and none of them runs on this device."""
    simulated = pick_device(settings.device, 0).type == "cpu"
    asked = dict.fromkeys(case.library for case in settings.cases if case.library in LIBRARIES)
    refused = [why for library in asked if (why := why_not(library, simulated)) is not None]
    if refused and len(refused) == len(asked):
        raise ResourceError(f"--against {'; '.join(refused)}")


def merged(ranks: Sequence[Rows]) -> Rows:
    """The rows of all ranks, merged to one row for in place and one for out of place."""
    return tuple(_merged(parts) for parts in zip(*ranks, strict=True))


def _merged(parts: tuple[BenchRow, ...]) -> BenchRow:
    wrong = None if parts[0].wrong is None else sum(part.wrong or 0 for part in parts)
    return with_times(parts[0], [{name: part.columns()[name] for name in _TIMES} for part in parts], wrong)


def _numbers(row: BenchRow) -> list[float]:
    columns = row.columns()
    return [*(columns[name] for name in _TIMES), row.wrong or 0]


def _with_numbers(row: BenchRow, numbers: list[float]) -> BenchRow:
    *times, wrong = numbers
    return row.changed(**dict(zip(_TIMES, times, strict=True)), wrong=None if row.wrong is None else int(wrong))


@contextmanager
def open_group(
    settings: Settings, url: str, rank: int | None = None, world_size: int | None = None
) -> Iterator[tuple[tricomm.Communicator, Baselines]]:
    """The communicator of a benchmark, on the device of the settings, and the libraries to compare with.

    `rank` and `world_size` default to torchrun's.
    """
    store, rank, world_size = open_store(url, rank, world_size, settings.timeout)
    device = pick_device(settings.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shared = device.type == "cuda" and torch.cuda.device_count() < world_size  # as `pick_device` assigns them
    # Without NCCL as the fallback: only the kernels are timed.
    options = tricomm.Options(timeout=settings.timeout, nccl=False, share_device=shared)
    with tricomm.Communicator(store, rank, world_size, device, options=options) as comm:
        baselines = Baselines(comm, store)
        try:
            yield comm, baselines
        finally:
            baselines.close()


def rank_main(emit: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Be one rank that `run` has started: send a header, the rows, and notes."""
    settings = typed_json.convert(data, Settings)
    torch.set_num_threads(1)
    env.default("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, whose name may have no address
    with open_group(settings, url, rank, world_size) as (comm, baselines):
        emit("header", **provenance.header(comm))
        for rows in measure(comm, settings, baselines, lambda text: emit("note", text=text)):
            emit("row", places=[asdict(row) for row in rows])
        comm.barrier()
