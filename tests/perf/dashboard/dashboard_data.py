"""Invented history rows and job statistics for tests of the dashboard."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tricomm.metrics.counters import Calls, Statistics
from tricomm.metrics.publish import JobStatistics, Routed
from tricomm.perf.bench_row import Measurement
from tricomm.perf.box import Box
from tricomm.perf.history.database import Entry, open_history
from tricomm.perf.history.schema import Run
from tricomm.policy.backend_choice import GroupFacts
from tricomm.policy.tuning_tables import Fingerprint

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
_LINES = (
    ("tricomm", "one_shot", "ll"),
    ("tricomm", "one_shot", "simple"),
    ("tricomm", "two_shot", "ll"),
    ("tricomm", "two_shot", "simple"),
    ("nccl", "nccl", "nccl"),
)
CPU, H100 = "a CPU", "NVIDIA H100 80GB HBM3"


def facts(device: str = H100, no_multicast: str = "no switch", **routes: object) -> str:
    """The facts of a box of eight such devices."""
    kind, gpu = ("cpu", "") if device == CPU else ("sm_90", device)
    found = {"device": "cpu" if device == CPU else "cuda", "world_size": 8, "nodes": 1, "no_kernels": None}
    group = GroupFacts(**{**found, "fallback": None, **routes})  # type: ignore[arg-type]
    links = Fingerprint(kind, gpu, 8, "" if device == CPU else "nvswitch")
    return json.dumps(asdict(Box(links, 64 << 20, 64, no_multicast, group)))


_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def entries(
    runs: int,
    step_at: int | None = None,
    sizes: Sequence[int] = SIZES,
    device: str = H100,
    simulated: bool = False,
    dtype: str = "float32",
    box: str | None = None,
) -> list[Entry]:
    """`runs` runs of five lines; from `step_at` on, one_shot/simple takes a tenth longer."""
    draw = random.Random(0)
    rows = []
    for number in range(runs):
        date = (_BEGAN + timedelta(hours=number)).isoformat(timespec="seconds")
        run = Run(
            date, device, "8 GPUs", 8, {"tricomm": "0.1.0"}, f"{number:07x}", facts(device) if box is None else box
        )
        for place, (library, algorithm, protocol) in enumerate(_LINES):
            if simulated and library != "tricomm":
                continue
            slower = 1.1 if step_at is not None and number >= step_at and place == 1 else 1.0
            for size in sizes:
                p50 = (5 + 2 * place + size / (2e4 * (place + 1))) * draw.gauss(1, 0.005) * slower
                names = (library, "all_reduce", algorithm, protocol, dtype, "sum", "eager", "out_of_place")
                times = (p50, 1.3 * p50, 2 * p50, 0.05 * p50)
                row = Measurement(*names, size, *times, simulated, 16, 8, 512)
                rows.append(Entry(run, row))
    return rows


def written(path: Path, rows: Sequence[Entry]) -> Path:
    """A history file, new or old, with `rows` added."""
    history = open_history(path)
    assert history is not None
    with history:
        history._database.execute("PRAGMA synchronous = OFF")
        assert all(history.append(entry.run, entry.measurement) for entry in rows)
    return path


def jobs(writing: int, straggler: int = 5, simulated: bool = False) -> list[JobStatistics]:
    """The `writing`th statistics of eight ranks, which publish every 5 s."""
    ranks = []
    for rank in range(8):
        late = {peer: writing * (0.9 if peer == straggler else 0.02) for peer in range(8) if peer != rank != straggler}
        calls = Calls(
            "all_reduce", "two_shot", "simple", 1 << 21, 5000 * writing, 5000 * writing << 21, 0, 0.0, 31.5, 40.0
        )
        comm = Statistics("ddp", rank, 8, f"cuda:{rank}", simulated, (calls,), late)
        routed = (Routed("nccl", "broadcast", 1024, writing, 1024 * writing),)
        ranks.append(JobStatistics(1, 4000 + rank, rank, "box", 1.7e9 + 5 * writing, 5.0, routed, (comm,)))
    return ranks
