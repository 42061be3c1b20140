"""The history as the page needs it: small enough to embed, and grouped so that a chart compares only like with like.

A *scene* is one chart: one device, topology, world size, collective, type, operation, mode and place, simulated or not.
It has a *line* per library and kernel, a line has points by size, and a point has its past.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from statistics import median
from typing import Any

from tricomm.kernels.collectives import registry
from tricomm.metrics.publish import JobStatistics
from tricomm.perf import bench_row, units
from tricomm.perf.bench_row import OURS
from tricomm.perf.cost_model.machines import MACHINES, MachineSpec
from tricomm.perf.dashboard import change_points, picks
from tricomm.perf.history.database import Entry, now

_OF_RUN = ("device", "topology", "world_size")
_OF_ROW = bench_row.chart_keys(bench_row.SCENE)
SCENE = (*_OF_RUN, *_OF_ROW)
_PAST = 256  # runs of a point that are shown, the latest
_LIVE = 200  # rows of jobs

Record = dict[str, Any]
_Key = tuple[Any, ...]
_run_key, _row_key = attrgetter(*_OF_RUN), attrgetter(*_OF_ROW)
_line_key = attrgetter(*bench_row.chart_keys(bench_row.LINE))  # library, algorithm, protocol
_Point = dict[int, list[Entry]]  # by run


def page_data(entries: Iterable[Entry], jobs: Sequence[JobStatistics] = (), source: str = "") -> Record:
    """All data of a page as plain JSON values. Times in microseconds, to four digits."""
    runs: dict[tuple[str, str], int] = {}
    scenes: dict[_Key, dict[_Key, dict[int, _Point]]] = {}
    boxes: dict[_Key, tuple[str, str]] = {}  # the latest run's date and facts
    count = 0
    for entry in entries:
        run, row = entry.run, entry.measurement
        count += 1
        number = runs.setdefault((run.date, run.commit), len(runs))
        scene = (*_run_key(run), *_row_key(row))
        boxes[scene] = max(boxes.get(scene, ("", "")), (run.date, run.box))
        sizes = scenes.setdefault(scene, {}).setdefault(_line_key(row), {})
        sizes.setdefault(row.nbytes, {}).setdefault(number, []).append(entry)
    dates = [date for date, _ in runs]
    data = {
        "made": now(),
        "source": source,
        "rows": count,
        "runs": list(runs),
        "scenes": [_scene(key, lines, dates, boxes[key][1]) for key, lines in scenes.items()],
        "jobs": [row for job in jobs for row in _job(job)][:_LIVE],
    }
    return data | {"unjudged": unjudged(data)}


def _scene(key: _Key, lines: dict[_Key, dict[int, _Point]], dates: list[str], box: str) -> Record:
    scene = dict(zip(SCENE, key, strict=True))
    pick = picks.of(scene, box)
    gpu = None if scene["simulated"] else machine(scene["device"])
    sizes = sorted({size for line in lines.values() for size in line})
    known = scene["world_size"] >= 1
    return scene | {
        "bus": units.bus_factor(scene["collective"], scene["world_size"]) if known else 1.0,
        "link_gbs": gpu.links if gpu is not None else None,
        "picks": {str(size): kernel for size in sizes if (kernel := pick(size)) is not None},
        "lines": [_line(scene, line, points, dates) for line, points in lines.items()],
    }


def _line(scene: Record, line: _Key, points: dict[int, _Point], dates: list[str]) -> Record:
    library, algorithm, protocol = line
    curve: Record = {"library": library, "kernel": f"{algorithm}/{protocol}" if library == OURS else library}
    curve["moved"] = _moved(scene, algorithm, protocol) if library == OURS else None
    for name in ("size", "p50", "p99", "skew", "run", "past", "changes"):
        curve[name] = []
    for size, point in sorted(points.items()):
        order = sorted(point, key=lambda run: dates[run])  # runs of several processes come in any order
        past = [_digits(median(e.measurement.p50_us for e in point[run])) for run in order]
        latest = [entry.measurement for entry in point[order[-1]]]
        changes = change_points.find(past)
        curve["size"].append(size)
        curve["p50"].append(past[-1])
        curve["p99"].append(_digits(max(m.p99_us for m in latest)))
        curve["skew"].append(_digits(median(m.skew_us for m in latest)))
        curve["run"].append(order[-_PAST:])
        curve["past"].append(past[-_PAST:])
        dropped = max(0, len(past) - _PAST)
        curve["changes"].append([[c.at - dropped, c.before, c.after] for c in changes if c.at >= dropped])
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


def machine(device: str) -> MachineSpec | None:
    """The GPU generation in a device's name; None if there is none that is known."""
    words = device.lower().replace("-", " ").split()
    return next((m for name, m in MACHINES.items() if name in words), None)


@dataclass(frozen=True)
class Changed:
    """A point whose level is `after` microseconds from run (date, commit) `since` on, and was `before` until then."""

    point: str
    before: float
    after: float
    since: tuple[str, str]

    @property
    def step(self) -> float:
        """0.1 if the point takes a tenth longer; infinite if it took no time before."""
        return self.after / self.before - 1 if self.before else math.inf

    def __str__(self) -> str:
        date, commit = self.since
        times = f"{self.before:g} -> {self.after:g} us"
        return f"{self.step:+8.1%}  {times:<24}  since {date} {commit or '(no commit)'}  {self.point}"


def changes(data: dict[str, Any]) -> list[Changed]:
    """The latest change of each point in the result of `page_data`, the largest step first."""
    return sorted(_changed(data), key=lambda change: -abs(change.step))


def unjudged(data: dict[str, Any]) -> tuple[int, int]:
    """Two counts over the points that the latest run of their chart has measured: those with too few runs for a change
    to be found, and all. `data` is the result of `page_data`."""
    counts = []
    for scene in data["scenes"]:
        points = [runs for line in scene["lines"] for runs in line["run"]]
        latest = max(data["runs"][runs[-1]] for runs in points)
        counts += [len(runs) for runs in points if data["runs"][runs[-1]] == latest]
    return sum(count < change_points.FEWEST for count in counts), len(counts)


def _changed(data: dict[str, Any]) -> Iterator[Changed]:
    for scene in data["scenes"]:
        mark = " (simulated)" if scene["simulated"] else ""
        where = f"{scene['world_size']} ranks, {scene['mode']}, {scene['place']}, on {scene['device']}{mark}"
        for line in scene["lines"]:
            for size, runs, changes in zip(line["size"], line["run"], line["changes"], strict=True):
                if changes:
                    at, before, after = changes[-1]
                    point = f"{scene['collective']} {scene['dtype']} {line['kernel']} {size} B, {where}"
                    yield Changed(point, before, after, tuple(data["runs"][runs[at]]))
