"""The page's data of live jobs: their rates over time, which ranks wait for which, and all counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from tricomm.metrics.counters import Statistics
from tricomm.metrics.publish import JobStatistics
from tricomm.perf.dashboard.jobs import activities

_ROWS = 200  # of the table
_SAMPLES = 240  # of a job that are kept: 20 minutes of a job that writes every 5 s
_NOTABLE = 1.0  # seconds of waiting for a rank, per other rank, that are worth a name
_Totals = tuple[float, int, int]  # when they were written, calls, bytes

Record = dict[str, Any]


class Live:
    """Keeps the totals of live jobs, because a rate needs two of them."""

    def __init__(self) -> None:
        self._totals: dict[str, deque[_Totals]] = {}

    def add(self, jobs: Sequence[JobStatistics]) -> Record:
        """The page's data of `jobs`, all that live now."""
        for job in jobs:
            kept, rows = self._totals.setdefault(job.name, deque(maxlen=_SAMPLES)), activities(job)
            if not kept or job.written > kept[-1][0]:
                kept.append((job.written, sum(row.calls for row in rows), sum(row.nbytes for row in rows)))
        self._totals = {job.name: self._totals[job.name] for job in jobs}
        groups = _groups(jobs)
        return {
            "jobs": [asdict(row) for job in jobs for row in activities(job)][:_ROWS],
            "rates": sorted(
                (_rates(job, self._totals[job.name]) for job in jobs), key=lambda rates: str(rates["name"])
            ),
            "waits": groups[:1],
            "straggler": _straggler(groups),
        }


def _name(job: JobStatistics) -> str:
    return f"pid {job.pid} on {job.host}"


def _rates(job: JobStatistics, kept: Sequence[_Totals]) -> Record:
    """Between two writings: the second one's time, and calls and GB of input per second."""
    ranks = ", ".join(str(rank) for rank in sorted({comm.rank for comm in job.communicators})) or "?"
    mark = " (simulated)" if any(comm.simulated for comm in job.communicators) else ""
    points = [
        (round(at, 2), max(0, calls - old_calls) / (at - before), max(0, nbytes - old_bytes) / (at - before) / 1e9)
        for (before, old_calls, old_bytes), (at, calls, nbytes) in pairwise(kept)
    ]
    return {"name": f"rank {ranks}, {_name(job)}{mark}", "points": points}


def _groups(jobs: Sequence[JobStatistics]) -> list[Record]:
    """Seconds by waiting rank and peer of each group in which ranks wait; the one with the longest waits first."""
    members: dict[tuple[str, str], dict[int, tuple[JobStatistics, Statistics]]] = {}
    for job in jobs:
        for comm in job.communicators:
            members.setdefault((job.host, comm.group), {})[comm.rank] = (job, comm)
    groups = []
    for (_, name), group in members.items():
        ranks = sorted(group.keys() | {peer for _, comm in group.values() for peer in comm.waited})
        waited = {rank: comm.waited for rank, (_, comm) in group.items()}
        seconds = [[round(waited.get(rank, {}).get(peer, 0.0), 2) for peer in ranks] for rank in ranks]
        late = [sum(row[at] for row in seconds) / max(1, len(group.keys() - {peer})) for at, peer in enumerate(ranks)]
        owners = [f"rank {rank}, {_name(group[rank][0])}" if rank in group else f"rank {rank}" for rank in ranks]
        mark = " (simulated)" if any(comm.simulated for _, comm in group.values()) else ""
        groups.append({"group": f"{name}{mark}", "ranks": ranks, "owners": owners, "seconds": seconds, "late": late})
    return sorted((group for group in groups if any(group["late"])), key=lambda group: -sum(group["late"]))


def _straggler(groups: Sequence[Record]) -> str:
    """A sentence about the rank that makes the others wait, if one does."""
    late = groups[0]["late"] if groups else [0.0]
    most = max(late)
    if most < _NOTABLE:
        return "No rank waits long for another."
    whose, group, share = groups[0]["owners"][late.index(most)], groups[0]["group"], most / sum(late)
    if share > 0.5:
        waits = f"its peers have waited {most:.1f} s each for it, {100 * share:.0f} % of all waiting"
        return f"A straggler in group {group}: {whose}; {waits}."
    return f"Ranks of group {group} wait for each other, most for {whose} ({most:.1f} s each): no straggler."
