"""The history as the page needs it: small enough to embed, and grouped so that a chart compares only like with like.

A *scene* is one chart: one device, topology, world size, collective, type, operation, mode and place, simulated or not.
It has a *line* per library and kernel, a line has points by size, and a point has its past.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from operator import attrgetter
from statistics import median
from typing import Any

from tricomm.kernels.collectives import registry
from tricomm.metrics.publish import JobStatistics
from tricomm.perf import bench_row, units
from tricomm.perf.bench_row import OURS
from tricomm.perf.cost_model import machines
from tricomm.perf.dashboard import change_points, changes, picks
from tricomm.perf.history.database import Entry, now

_OF_RUN = ("device", "topology", "world_size")
_OF_ROW = bench_row.chart_keys(bench_row.SCENE)
SCENE = (*_OF_RUN, *_OF_ROW)
_PAST = 256  # runs of a point that are shown, the latest
_JUMP = timedelta(days=1)  # back in time: no run takes longer
_LIVE = 200  # rows of jobs

Record = dict[str, Any]
_Key = tuple[Any, ...]
_run_key, _row_key = attrgetter(*_OF_RUN), attrgetter(*_OF_ROW)
_line_key = attrgetter(*bench_row.chart_keys(bench_row.LINE))  # library, algorithm, protocol
_Point = dict[int, list[Entry]]  # by run


def page_data(entries: Iterable[Entry], jobs: Sequence[JobStatistics] = (), source: str = "") -> Record:
    """All data of a page as plain JSON values. Times in microseconds, to four digits."""
    entries = list(entries)
    runs, notes = _ordered(list(dict.fromkeys((entry.run.date, entry.run.commit) for entry in entries)))
    numbers = {run: number for number, run in enumerate(runs)}
    scenes: dict[_Key, dict[_Key, dict[int, _Point]]] = {}
    boxes: dict[_Key, tuple[int, str]] = {}  # the latest run and its facts
    for entry in entries:
        run, row = entry.run, entry.measurement
        number = numbers[run.date, run.commit]
        scene = (*_run_key(run), *_row_key(row))
        boxes[scene] = max(boxes.get(scene, (0, "")), (number, run.box))
        sizes = scenes.setdefault(scene, {}).setdefault(_line_key(row), {})
        sizes.setdefault(row.nbytes, {}).setdefault(number, []).append(entry)
    data = {
        "made": now(),
        "source": source,
        "notes": notes,
        "rows": len(entries),
        "runs": runs,
        "scenes": [_scene(key, lines, boxes[key][1]) for key, lines in scenes.items()],
        "jobs": [row for job in jobs for row in _job(job)][:_LIVE],
    }
    return data | {"unjudged": changes.unjudged(data)}


def _ordered(runs: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Runs by date, because several processes write at a time; in the order of writing if the clock has jumped, which a
    note then says."""
    jumps, latest = 0, datetime.min + _JUMP
    for date, _ in runs:
        try:
            moment = datetime.fromisoformat(date).replace(tzinfo=None)  # all are UTC
        except ValueError:
            continue
        jumps += moment < latest - _JUMP
        latest = moment
    notes = []
    if jumps:
        notes.append(f"The clock has jumped back ({jumps}x): runs are in the order in which they were written.")
    if latest > datetime.fromisoformat(now()).replace(tzinfo=None) + _JUMP:
        notes.append(f"The latest run is dated {latest}, in the future: this machine's clock is or was wrong.")
    return (runs if jumps else sorted(runs)), notes


def _scene(key: _Key, lines: dict[_Key, dict[int, _Point]], box: str) -> Record:
    scene = dict(zip(SCENE, key, strict=True))
    pick = picks.of(scene, box)
    gpu = None if scene["simulated"] else machines.of_device(scene["device"])
    sizes = sorted({size for line in lines.values() for size in line})
    known = scene["world_size"] >= 1
    return scene | {
        "bus": units.bus_factor(scene["collective"], scene["world_size"]) if known else 1.0,
        "link_gbs": gpu.links if gpu is not None else None,
        "picks": {str(size): kernel for size in sizes if (kernel := pick(size)) is not None},
        "lines": [_line(scene, line, points) for line, points in lines.items()],
    }


def _line(scene: Record, line: _Key, points: dict[int, _Point]) -> Record:
    library, algorithm, protocol = line
    curve: Record = {"library": library, "kernel": f"{algorithm}/{protocol}" if library == OURS else library}
    curve["moved"] = _moved(scene, algorithm, protocol) if library == OURS else None
    for name in ("size", "p50", "p99", "skew", "run", "past", "changes", "unproven"):
        curve[name] = []
    for size, point in sorted(points.items()):
        order = sorted(point)
        past = [_digits(median(e.measurement.p50_us for e in point[run])) for run in order]
        latest = [entry.measurement for entry in point[order[-1]]]
        steps = change_points.find(past)
        late = change_points.unproven(past, steps)
        curve["size"].append(size)
        curve["p50"].append(past[-1])
        curve["p99"].append(_digits(max(m.p99_us for m in latest)))
        curve["skew"].append(_digits(median(m.skew_us for m in latest)))
        curve["run"].append(order[-_PAST:])
        curve["past"].append(past[-_PAST:])
        dropped = max(0, len(past) - _PAST)
        for name, found in (("changes", steps), ("unproven", [late] if late is not None else [])):
            curve[name].append([[c.at - dropped, c.before, c.after] for c in found if c.at >= dropped])
    return curve


def _moved(scene: Record, algorithm: str, protocol: str) -> float | None:
    """Bytes to and from peers over the least that any algorithm needs."""
    world_size, collective = scene["world_size"], scene["collective"]
    kernels = (registry.KERNELS + registry.ZERO_COPY + registry.FUSED) if 2 <= world_size <= 16 else ()
    for kernel in kernels:
        if (kernel.collective, kernel.algorithm, kernel.protocol) == (collective, algorithm, protocol):
            least = units.least(collective, world_size)
            return round(float(units.moved(kernel, world_size) / least), 3) if least else None
    return None


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _job(job: JobStatistics) -> list[Record]:
    owner = {"job": f"pid {job.pid} on {job.host}"}
    rows: list[Record] = []
    for comm in job.communicators:
        group = {"group": f"{comm.group} rank {comm.rank} of {comm.world_size}", "simulated": comm.simulated}
        for c in comm.calls:
            counts = {"collective": c.collective, "bucket": c.bucket, "calls": c.calls, "nbytes": c.nbytes}
            times = {"p50": c.p50_us, "p99": c.p99_us}
            rows.append(owner | group | {"route": "kernels", "kernel": f"{c.algorithm}/{c.protocol}"} | counts | times)
        rows += [
            owner | group | {"route": "waited", "collective": f"for rank {peer}", "seconds": round(seconds, 2)}
            for peer, seconds in comm.waited.items()
            if seconds
        ]
    return rows + [owner | asdict(routed) for routed in job.routed]
