"""Several GPUs: peer access, speed of copies, latency of a word, all collectives beside NCCL and symmetric memory.

The table has nccl-tests' columns and formulas, out of place if a library can. Implementations take turns, and the time
is the slowest rank's median. Flat numbers of a case are of its smallest (`_us`) and of its largest message (`_gbps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from statistics import median
from typing import Any

import torch

from tricomm.kernels import layout
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.perf import units
from tricomm.perf.bench import timing
from tricomm.perf.bench_row import OURS
from tricomm.perf.evidence import checks, compiling, hardware
from tricomm.perf.evidence.stage import KILL, Data, EvidenceSettings, Skip, Stage, StageCase, Wrong
from tricomm.perf.evidence.stages import peers, processes
from tricomm.perf.workers import run_workers

SIZES = tuple(1 << n for n in range(10, 27, 2))  # 1 KiB to 64 MiB
_DRY_SIZES = (64, 256)
_DRY_COLLECTIVES = ("gather", "barrier")  # stage `peers` has the all-reduce
_TYPE, _DTYPE = "float32", torch.float32
_COPY = 256 << 20
_SHOWN = ("open_pairs", "pairs_number", "least_gbps", "most_gbps", "ll_least_us", "ll_most_us", "flag_least_us",
          "flag_most_us", "tricomm_us", "tricomm_graph_us", "nccl_us", "nccl_graph_us", "tricomm_busbw_gbps",
          "nccl_busbw_gbps", "kind", "calls")  # fmt: skip


def missing(settings: EvidenceSettings) -> str | None:
    """Why none of this can run, or None."""
    none = hardware.no_gpu(settings)
    if none is not None or settings.dry_run or torch.cuda.device_count() > 1:
        return none
    return "one GPU is visible; this stage needs two or more"


def worlds(gpus: int) -> tuple[int, ...]:
    """The numbers of ranks: one for each GPU, and 2 and 4 if there are more."""
    most = min(gpus, layout.MAX_WORLD_SIZE)
    return (*(n for n in (2, 4) if n < most), most)


def _cases(settings: EvidenceSettings) -> Iterable[StageCase]:
    gpus = 2 if settings.dry_run else torch.cuda.device_count()
    devices = [torch.device("cpu") if settings.dry_run else torch.device("cuda", n) for n in range(gpus)]
    reaches = (lambda a, b: True) if settings.dry_run else torch.cuda.can_device_access_peer
    yield StageCase("peer access", lambda: matrix(gpus, reaches))
    yield StageCase("copies", lambda: copies(devices, 4096 if settings.dry_run else _COPY))
    yield StageCase("latency", lambda: _latency(settings, worlds(gpus)[-1]))
    lost: dict[int, peers.Lost] = {n: {} for n in worlds(gpus)}
    for world_size in worlds(gpus):
        for collective in _DRY_COLLECTIVES if settings.dry_run else COLLECTIVES:
            first = settings.dry_run or collective == "all_reduce"
            yield StageCase(
                f"table/{collective}/{world_size} ranks",
                partial(_table, settings, collective, world_size, lost[world_size]),
                tier=0 if first else 2 if world_size == worlds(gpus)[-1] else 3,
            )
    world_size = worlds(gpus)[-1]
    yield StageCase(f"switch/{world_size} ranks", partial(_switch, settings, world_size), limit=240.0, tier=1)
    if settings.dry_run:
        return  # stage `processes` sweeps
    for kernel in checks.of_processes(world_size, False):
        ranks = {"tasks": ["sweep"], "kernel": kernel.name, "dry_run": False, "one_gpu": False}
        yield StageCase(
            f"sweep/{kernel.name}/{world_size} ranks",
            partial(processes.run, ranks, world_size),
            limit=240.0,
            tier=1,
            jobs=partial(compiling.sweep, kernel, world_size, settings, checks.PARTS),
        )


def matrix(gpus: int, reaches: Callable[[int, int], bool]) -> Data:
    """1 if the GPU of the row reaches that of the column, or is the same."""
    rows = [[int(a == b or reaches(a, b)) for b in range(gpus)] for a in range(gpus)]
    return {"matrix": rows, "open_pairs": sum(map(sum, rows)) - gpus, "pairs_number": gpus * (gpus - 1)}


def copies(devices: list[torch.device], nbytes: int, rounds: int = 9) -> Data:
    """GB/s of a copy from each device to each other one, one copy at a time."""
    pairs = []
    for a, b in permutations(range(len(devices)), 2):
        x = torch.ones(nbytes, dtype=torch.uint8, device=devices[a])
        y = torch.zeros(nbytes, dtype=torch.uint8, device=devices[b])
        seconds = [copied(x, y) for _ in range(rounds + 1)][1:]
        if not bool((y == 1).all()):
            raise Wrong(f"a copy of {nbytes} bytes from {devices[a]} ({a}) to {devices[b]} ({b}) did not arrive")
        pairs.append({"from": a, "to": b, "copy_gbps": round(nbytes / median(seconds) / 1e9, 3)})
    speeds = [pair["copy_gbps"] for pair in pairs]
    return {"nbytes": nbytes, "least_gbps": min(speeds), "most_gbps": max(speeds), "pairs": pairs}


def copied(x: torch.Tensor, y: torch.Tensor) -> float:
    """Seconds of a copy, which torch makes on the current stream of the source device."""
    with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():
        elapsed = timing.stopwatch(x.device)
        y.copy_(x, non_blocking=True)
        return elapsed() / 1e6


def _switch(settings: EvidenceSettings, world_size: int) -> Data:
    ranks = {"tasks": ["switch"], "kernel": "switch", "dry_run": settings.dry_run, "one_gpu": False}
    data = processes.run(ranks, world_size)
    if not data["calls"] and not settings.dry_run:
        raise Skip("no memory with a multicast address; tricomm doctor says why")
    return data


def _latency(settings: EvidenceSettings, world_size: int) -> Data:
    dry = settings.dry_run
    ranks = {"dry_run": dry, "one_gpu": False, "trips": 2 if dry else 1000, "samples": 1 if dry else 7}
    messages = run_workers("tricomm.perf.evidence.latency:rank_main", world_size, ranks, 100.0)
    return latencies([message for _, message in messages], world_size)


def latencies(measured: list[dict[str, Any]], world_size: int) -> Data:
    """Medians by pair and way, and the extremes of each way."""
    pairs: dict[tuple[int, int], dict[str, Any]] = {}
    for record in measured:
        a, b = record["ranks"]
        pair = pairs.setdefault((a, b), {"from": a, "to": b})
        pair[f"{record['way']}_us"] = round(median(record["samples"]), 3)
    if len(pairs) != world_size * (world_size - 1) // 2:
        raise Wrong(f"{len(pairs)} pairs of {world_size} ranks have reported their times")
    data: Data = {}
    for way in ("ll", "flag"):
        times = [pair[f"{way}_us"] for pair in pairs.values()]
        data |= {f"{way}_least_us": min(times), f"{way}_most_us": max(times)}
    return {**data, "pairs": list(pairs.values())}


def _table(settings: EvidenceSettings, collective: str, world_size: int, lost: peers.Lost) -> Data:
    sizes = (0,) if collective == "barrier" else _DRY_SIZES if settings.dry_run else SIZES
    ranks = peers.rank_settings(settings, collective, _TYPE, sizes, world_size, one_gpu=False)
    ranks["seconds"] /= len(sizes)
    ranks["names"] = [name for name in ranks["names"] if not name.startswith(("kraken", f"{OURS}_"))]
    rows = peers.compare(ranks, world_size, lost)
    return table(collective, world_size, {size: rows[size] for size in sizes})


def table(collective: str, world_size: int, rows: dict[int, peers.Row]) -> Data:
    """nccl-tests' rows, a time and two bandwidths for each implementation; #wrong is 0, or it would be missing."""
    lines: list[Data] = []
    for row in rows.values():
        size = units.total_bytes(collective, row["count"], _DTYPE.itemsize, world_size)
        line = {"size_bytes": size, "count": row["count"], "type": _TYPE, "choice": row["choice"]}
        for name, samples in row["times"].items():
            spread = hardware.spread(samples)
            line |= {f"{name}_us": spread["median_us"], f"{name}_p90_us": spread["p90_us"], f"{name}_wrong": 0}
            if size:
                speed = units.algorithm_bandwidth(size, spread["median_us"])
                factor = units.bus_factor(collective, world_size)
                line |= {f"{name}_algbw_gbps": round(speed, 4), f"{name}_busbw_gbps": round(speed * factor, 4)}
        lines.append({**line, "missing": row["missing"]})
    flat = {key: value for key, value in lines[0].items() if key.endswith("_us") and "_p90" not in key}
    flat |= {key: value for key, value in lines[-1].items() if key.endswith("_busbw_gbps")}
    return {**flat, "rows": lines}


STAGE = Stage(
    "many_gpus", "Several GPUs: links, latency, all collectives", _cases, missing, columns=_SHOWN, needs=(KILL,),
    share=8.0,
)  # fmt: skip
