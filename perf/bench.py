"""`tricomm bench`: the rows of all ranks, put together.

A row is complete when every rank has sent it: its time is the largest of theirs, its wrong elements the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tricomm import env
from tricomm.errors import InvalidArgument
from tricomm.perf import facts
from tricomm.perf.bench_measure import PLACES, measure
from tricomm.perf.bench_plan import Settings, algorithm_bandwidth, bus_factor
from tricomm.perf.bench_ranks import open_group
from tricomm.perf.ranks import Record, talk

Listener = Callable[[Record], None]


@dataclass
class Results:
    """The header and the merged rows of a run."""

    header: Record
    rows: list[Record]

    @property
    def wrong(self) -> int:
        """Wrong elements of all rows and ranks."""
        return sum(row[p]["wrong"] or 0 for row in self.rows for p in PLACES)

    def to_json(self, settings: Settings) -> Record:
        """What `--json` writes."""
        return {"schema": 1, "header": self.header, "settings": settings.to_json(), "results": self.rows}


def run(settings: Settings, world_size: int, on_header: Listener, on_row: Listener) -> Results:
    """Start `world_size` ranks of this node and collect their rows. Raises `RankFailed`; leaves no rank behind."""
    header: Record = {}
    parts: dict[int, list[Record]] = {}
    rows: list[Record] = []
    seen = [0] * world_size
    for rank, message in talk("tricomm.perf.bench_ranks", world_size, settings.to_json(), settings.timeout):
        what = message.pop("what")
        if what == "header" and rank == 0:
            header = message
            on_header(header)
        elif what == "row":
            complete = parts.setdefault(seen[rank], [])
            complete.append(message)
            seen[rank] += 1
            if len(complete) == world_size:
                rows.append(merge(complete, world_size, header["simulated"]))
                on_row(rows[-1])
    return Results(header, rows)


def merge(parts: list[Record], world_size: int, simulated: bool) -> Record:
    """One record of all ranks' records of a row. Times in microseconds, bandwidths in 1e9 bytes per second."""
    row = {**parts[0], "ranks": world_size, "simulated": simulated}
    for place in PLACES:
        times = [part[place]["time_us"] for part in parts]
        algbw = algorithm_bandwidth(row["size_bytes"], max(times))
        row[place] = {
            "time_us": max(times),
            "avg_us": sum(times) / world_size,
            "algbw_gbs": algbw,
            "busbw_gbs": algbw * bus_factor(row["collective"], world_size),
            "wrong": None if row[place]["wrong"] is None else sum(part[place]["wrong"] for part in parts),
        }
    return row


def join(settings: Settings, on_header: Listener, on_row: Listener) -> Results:
    """Be one rank of a group that somebody else started (torchrun): every rank gets the merged rows.

    The ranks' numbers are put together by tricomm's own all-gather; with `run` they are not.
    """
    rank, world_size = env.integer("RANK"), env.integer("WORLD_SIZE")
    if rank is None or world_size is None:
        raise InvalidArgument("RANK and WORLD_SIZE are both needed; torchrun sets them")
    with open_group(settings, "env://", rank, world_size) as comm:
        header = facts.header(comm)
        on_header(header)
        rows = []
        for row in measure(comm, settings):
            mine = [(row[p] or {}).get(k) or 0 for p in PLACES for k in ("time_us", "wrong")]
            packed = torch.tensor([round(v * 1000) for v in mine], dtype=torch.int64, device=comm.device)
            gathered = comm.all_gather(packed).cpu().reshape(world_size, -1).tolist()
            rows.append(merge([_unpack(row, numbers) for numbers in gathered], world_size, comm.simulated))
            on_row(rows[-1])
        comm.barrier()
    return Results(header, rows)


def _unpack(row: Record, numbers: list[int]) -> Record:
    part = dict(row)
    for i, place in enumerate(PLACES):
        wrong = None if row[place]["wrong"] is None else numbers[2 * i + 1] // 1000
        part[place] = {"time_us": numbers[2 * i] / 1000, "wrong": wrong}
    return part
