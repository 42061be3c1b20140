"""`tricomm bench`: the rows of all ranks, put together.

A row is complete when every rank has sent it: its time is the largest of theirs, its wrong elements the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tricomm import env
from tricomm.errors import InvalidArgument
from tricomm.perf import provenance
from tricomm.perf.bench.bench_rank import open_group
from tricomm.perf.bench.measure import measure
from tricomm.perf.bench.request import Settings
from tricomm.perf.bench.timing import over_ranks
from tricomm.perf.bench_row import OURS, PLACES
from tricomm.perf.units import algorithm_bandwidth, bus_factor
from tricomm.perf.workers import WorkerMessage, run_workers

_CARRIED = ("time_us", "p50_us", "p99_us", "max_us", "wrong")


@dataclass
class Results:
    """The header and the merged rows of a run."""

    header: WorkerMessage = field(default_factory=dict)
    rows: list[WorkerMessage] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Wrong elements of all rows and ranks."""
        return sum(row[p]["wrong"] or 0 for row in self.rows for p in PLACES if row[p] is not None)

    def to_json(self, settings: Settings) -> WorkerMessage:
        """What `--json` writes."""
        return {"schema": 1, "header": self.header, "settings": settings.to_json(), "results": self.rows}


@dataclass(frozen=True)
class Listener:
    """Who is told of a run as it goes on."""

    header: Callable[[WorkerMessage], None]
    row: Callable[[WorkerMessage], None]
    note: Callable[[str], None]


def run(settings: Settings, world_size: int, listener: Listener, results: Results) -> None:
    """Start `world_size` ranks of this node and collect their rows into `results`, which are whole rows whenever this
    ends. Raises `RankFailed`; leaves no rank behind."""
    parts: dict[int, list[WorkerMessage]] = {}
    seen = [0] * world_size
    for rank, message in run_workers(
        "tricomm.perf.bench.bench_rank:main", world_size, settings.to_json(), settings.timeout
    ):
        what = message.pop("event")
        if what == "header" and rank == 0:
            results.header = message
            listener.header(message)
        elif what == "note" and rank == 0:
            listener.note(message["text"])
        elif what == "row":
            complete = parts.setdefault(seen[rank], [])
            complete.append(message)
            seen[rank] += 1
            if len(complete) == world_size:
                results.rows.append(merge(complete, world_size, results.header["simulated"]))
                listener.row(results.rows[-1])


def merge(parts: list[WorkerMessage], world_size: int, simulated: bool) -> WorkerMessage:
    """One record of all ranks' records of a row. Times in microseconds, bandwidths in 1e9 bytes per second.

    Times of another library on a CPU are its own, and not simulated.
    """
    row = {**parts[0], "ranks": world_size, "simulated": simulated and parts[0]["library"] == OURS}
    for place in PLACES:
        if row[place] is None:
            continue
        times = over_ranks([part[place] for part in parts])
        algbw = algorithm_bandwidth(row["size_bytes"], times["time_us"])
        row[place] = {
            **times,
            "algbw_gbs": algbw,
            "busbw_gbs": algbw * bus_factor(row["collective"], world_size),
            "wrong": None if row[place]["wrong"] is None else sum(part[place]["wrong"] for part in parts),
        }
    return row


def join(settings: Settings, listener: Listener, results: Results) -> None:
    """Be one rank of a group that somebody else started (torchrun): every rank gets the merged rows.

    The ranks' numbers are put together by tricomm's own all-gather; with `run` they are not.
    """
    rank, world_size = env.integer("RANK"), env.integer("WORLD_SIZE")
    if rank is None or world_size is None:
        raise InvalidArgument("RANK and WORLD_SIZE are both needed; torchrun sets them")
    with open_group(settings, "env://", rank, world_size) as (comm, others):
        results.header = provenance.header(comm)
        listener.header(results.header)
        for row in measure(comm, settings, others, listener.note):
            mine = [(row[p] or {}).get(k) or 0 for p in PLACES for k in _CARRIED]
            packed = torch.tensor([round(v * 1000) for v in mine], dtype=torch.int64, device=comm.device)
            gathered = comm.all_gather(packed).cpu().reshape(world_size, -1).tolist()
            results.rows.append(merge([_unpack(row, numbers) for numbers in gathered], world_size, comm.simulated))
            listener.row(results.rows[-1])
        comm.barrier()


def _unpack(row: WorkerMessage, numbers: list[int]) -> WorkerMessage:
    part = dict(row)
    for i, place in enumerate(PLACES):
        if row[place] is None:
            continue
        found: WorkerMessage = {name: numbers[len(_CARRIED) * i + j] / 1000 for j, name in enumerate(_CARRIED)}
        part[place] = found | {"wrong": None if row[place]["wrong"] is None else int(found["wrong"])}
    return part
