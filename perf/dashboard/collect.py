"""The history in the form that the page needs: small enough to embed, and grouped so that each chart compares only
comparable measurements.

A *scene* is one chart: one device, topology, world size, collective, type, operation, mode and place, simulated or not.
It has a *line* per library and kernel, a line has points by size, and a point has its past.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from operator import attrgetter
from statistics import median
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf import bench_row, box, units
from tricomm.perf.bench_row import OURS
from tricomm.perf.cost_model import kernel_time, machines
from tricomm.perf.cost_model.machines import MachineSpec
from tricomm.perf.dashboard import change_points, changes, picks
from tricomm.perf.history.database import Entry, now

_OF_RUN = ("device", "topology", "world_size")
_OF_ROW = bench_row.chart_keys(bench_row.SCENE)
SCENE = (*_OF_RUN, *_OF_ROW)
_PAST = 256  # runs of a point that are shown, the latest
_JUMP = timedelta(days=1)  # back in time: no run takes longer

Record = dict[str, Any]
_Key = tuple[Any, ...]
_run_key, _row_key = attrgetter(*_OF_RUN), attrgetter(*_OF_ROW)
_line_key = attrgetter(*bench_row.chart_keys(bench_row.LINE))  # library, algorithm, protocol
_Point = dict[int, list[Entry]]  # by run


def page_data(entries: Iterable[Entry], source: str = "") -> Record:
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
        "model_error": kernel_time.median_error(kernel_time.check()),
    }
    return data | {"unjudged": changes.unjudged(data)}


def _ordered(runs: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Runs by date, because several processes write at a time. If the clock has jumped, in the order of writing, with a
    note."""
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


def _scene(key: _Key, lines: dict[_Key, dict[int, _Point]], facts: str) -> Record:
    scene = dict(zip(SCENE, key, strict=True))
    pick = picks.of(scene, facts)
    known = box.loads(facts)
    links = machines.links_of(scene["device"], known.fingerprint.topology if known is not None else "")
    gpu = machines.of_device(scene["device"]) if links is not None else None
    sizes = sorted({size for line in lines.values() for size in line})
    latest = max(run for line in lines.values() for point in line.values() for run in point)
    return scene | {
        "bus": units.bus_factor(scene["collective"], scene["world_size"]) if scene["world_size"] >= 1 else 1.0,
        "link_gbs": links,
        "picks": {str(size): kernel for size in sizes if (kernel := pick(size)) is not None},
        "lines": [_line(scene, gpu, latest, line, points) for line, points in lines.items()],
    }


def _line(scene: Record, gpu: MachineSpec | None, latest: int, line: _Key, points: dict[int, _Point]) -> Record:
    library, algorithm, protocol = line
    kernel = _kernel(scene, algorithm, protocol) if library == OURS else None
    curve: Record = {"library": library, "kernel": f"{algorithm}/{protocol}" if library == OURS else library}
    curve["moved"] = _moved(scene, kernel) if kernel is not None else None
    for name in ("size", "predicted", "run", "past", "p99", "skew", "changes", "unproven"):
        curve[name] = []
    for size, point in sorted(points.items()):
        runs = [(run, [entry.measurement for entry in point[run]]) for run in sorted(point)]
        past = [_digits(median(m.p50_us for m in rows)) for _, rows in runs]
        steps = change_points.find(past)
        late = change_points.unproven(past, steps) if runs[-1][0] == latest else None
        curve["size"].append(size)
        curve["predicted"].append(_predicted(scene, gpu, kernel, size))
        curve["run"].append([run for run, _ in runs[-_PAST:]])
        curve["past"].append(past[-_PAST:])
        curve["p99"].append([_digits(max(m.p99_us for m in rows)) for _, rows in runs[-_PAST:]])
        curve["skew"].append([_digits(median(m.skew_us for m in rows)) for _, rows in runs[-_PAST:]])
        dropped = max(0, len(past) - _PAST)
        for name, found in (("changes", steps), ("unproven", [late] if late is not None else [])):
            curve[name].append([[c.at - dropped, c.before, c.after] for c in found if c.at >= dropped])
    return curve


def _kernel(scene: Record, algorithm: str, protocol: str) -> Kernel | None:
    names = (scene["collective"], algorithm, protocol)
    known = (registry.KERNELS + registry.ZERO_COPY + registry.FUSED) if 2 <= scene["world_size"] <= 16 else ()
    return next((k for k in known if (k.collective, k.algorithm, k.protocol) == names), None)


def _moved(scene: Record, kernel: Kernel) -> float | None:
    """Bytes to and from peers over the least that any algorithm needs."""
    least = units.least(scene["collective"], scene["world_size"])
    return round(float(units.moved(kernel, scene["world_size"]) / least), 3) if least else None


def _predicted(scene: Record, gpu: MachineSpec | None, kernel: Kernel | None, size: int) -> float | None:
    """Microseconds by the cost model."""
    name, ranks = scene["collective"], scene["world_size"]
    if gpu is None or kernel is None or name not in units.DATA_COLLECTIVES:
        return None
    nbytes = units.input_bytes(name, units.row_elements(name, size, 1, ranks), 1, ranks)
    try:
        mode = "eager" if scene["mode"] == "eager" else "graph"
        launching = kernel_time.launching(gpu, kernel_time.is_dependent(gpu, kernel, ranks, nbytes), mode)
        return _digits(kernel_time.predict(launching, kernel, ranks, nbytes, mode).time_us)
    except InvalidArgument:  # these GPUs lack its switch
        return None


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
