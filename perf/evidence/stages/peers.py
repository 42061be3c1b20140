"""The same all-reduce by tricomm, torch's symmetric memory, NCCL and kraken, ranks as processes on one GPU.

Processes take turns on a device in slices of time, which dominate the measurement: compare only within a case. A
`ratio` is an implementation's time over that of tricomm's own choice, round by round: above 1, tricomm is faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from tricomm.perf.bench_row import OURS
from tricomm.perf.evidence import hardware
from tricomm.perf.evidence.comparison import offered
from tricomm.perf.evidence.stage import SLICE, Data, EvidenceSettings, Stage, StageCase, Wrong
from tricomm.perf.workers import RankFailed, run_workers

SIZES = (8 << 10, 64 << 10, 512 << 10, 4 << 20)
FIRST_SIZE = SIZES[1]
_RANKS = "tricomm.perf.evidence.comparison:rank_main"
_SILENCE = 45.0  # seconds after which silent ranks are lost; starting one takes many of them
_LIMIT = 112.0  # seconds of a comparison, less than the limit of its case
_DRY = {"calls": 2, "rounds": 2, "seconds": 10.0}
_GPU = {"calls": 10, "rounds": 15, "seconds": 30.0}
_SHOWN = (OURS, "symm_mem_one_shot", "symm_mem_two_shot", "nccl", "kraken_one_shot", "kraken_two_shot")

Lost = dict[str, str]  # implementations that cost their ranks, with the errors
Row = dict[str, Any]  # the ranks' result for one size: count, choice, missing, times by implementation


def _cases(settings: EvidenceSettings) -> Iterable[StageCase]:
    dry = settings.dry_run
    for world_size in (2,) if dry else (2, 4):
        lost: Lost = {}  # an implementation that cost one case its ranks is left out of the others
        for nbytes in (64,) if dry else SIZES:
            yield StageCase(
                f"all_reduce/{world_size} ranks/{nbytes} bytes",
                partial(_run, settings, world_size, nbytes, lost),
                tier=(0 if world_size == 2 else 2) if nbytes in (64, FIRST_SIZE) else 3 if world_size == 2 else 5,
            )


def _run(settings: EvidenceSettings, world_size: int, nbytes: int, lost: Lost) -> Data:
    request = rank_settings(settings, "all_reduce", "bfloat16", (nbytes,), world_size, one_gpu=True)
    row = compare(request, world_size, lost)[nbytes]
    return {"nbytes": nbytes, "choice": row["choice"], **described(row["times"]), "missing": row["missing"]}


def rank_settings(
    settings: EvidenceSettings, collective: str, dtype: str, sizes: tuple[int, ...], world_size: int, one_gpu: bool
) -> dict[str, Any]:
    """The settings of `comparison.rank_main`; every implementation on offer takes part."""
    return {
        "collective": collective, "dtype": dtype, "sizes": list(sizes), "graphs": collective != "barrier",
        "names": list(offered(collective, world_size, settings.dry_run)), "dry_run": settings.dry_run,
        "one_gpu": one_gpu, "peers": str(settings.peers) if settings.peers else None,
        **(_DRY if settings.dry_run else _GPU),
    }  # fmt: skip


@dataclass
class _Progress:
    """The messages of the ranks: the implementation `at` which they are, and the times by size."""

    world_size: int
    at: str | None = None
    parts: dict[int, list[Row]] = field(default_factory=dict)

    def add(self, message: dict[str, Any]) -> None:
        if message["event"] == "times":
            self.parts.setdefault(message["size"], []).append(message)
        else:
            self.at = message["name"]

    def rows(self) -> dict[int, Row]:
        """The sizes of which all ranks have sent times, with the slowest rank's times."""
        rows = {}
        for size, parts in self.parts.items():
            if len(parts) == self.world_size:
                slowest = {
                    name: [max(each) for each in zip(*(part["times"][name] for part in parts), strict=True)]
                    for name in parts[0]["times"]
                }
                rows[size] = {**parts[0], "times": slowest}
        return rows


def compare(request: dict[str, Any], world_size: int, lost: Lost) -> dict[int, Row]:
    """Have ranks compare; a row per size. Raises `Wrong` if tricomm did not run or was wrong.

    An implementation at which a rank dies or falls silent goes to `lost`, and the others start again without it.
    """
    end = time.monotonic() + _LIMIT
    while True:
        names = [name for name in request["names"] if name not in lost]
        progress = _Progress(world_size)
        try:
            silence = min(_SILENCE, _remaining(end, lost))
            for _, message in run_workers(_RANKS, world_size, {**request, "names": names}, silence):
                _remaining(end, lost)
                progress.add(message)
                rows = progress.rows()
                if len(rows) == len(request["sizes"]):
                    return {size: _judged(row, request["names"], lost) for size, row in rows.items()}
            raise Wrong("the ranks have ended without a result")
        except RankFailed as error:
            name = (progress.at or OURS).removesuffix("_graph")
            if name.startswith(OURS):
                raise Wrong(f"at {progress.at or 'the start'}: {error}") from None
            lost[name] = f"ranks were lost at it: {error}"[:400]


def _remaining(end: float, lost: Lost) -> float:
    remaining = end - time.monotonic()
    if remaining <= 0:
        raise Wrong(f"no result within {_LIMIT:g} s; ranks were lost at {', '.join(lost) or 'nothing'}")
    return remaining


def _judged(row: Row, names: Iterable[str], lost: Lost) -> Row:
    """The row, with lost implementations among the missing ones. A kernel may refuse a call that it does not cover."""
    for name, why in row["missing"].items():
        refused = why.startswith("InvalidArgument") and name.removesuffix("_graph") != OURS
        if name.startswith(OURS) and not refused:
            raise Wrong(f"{name}: {why}")
    return {**row, "missing": {**row["missing"], **{name: why for name, why in lost.items() if name in names}}}


def described(times: dict[str, list[float]]) -> Data:
    """Flat numbers of each implementation: median, percentiles, and the ratio to tricomm's own choice."""
    data: Data = {"rounds": len(times[OURS])}
    for name, samples in times.items():
        spread = hardware.spread(samples)
        data |= {
            f"{name}_{key}us": spread[f"{long}_us"] for key, long in (("", "median"), ("p10_", "p10"), ("p90_", "p90"))
        }
        base = f"{OURS}_graph" if name.endswith("_graph") else OURS
        if name != base:
            data[f"{name}_ratio"] = round(median(a / b for a, b in zip(samples, times[base], strict=True)), 3)
    return data


STAGE = Stage(
    "peers", "All-reduce beside other libraries, ranks as processes on one GPU", _cases, hardware.no_gpu,
    columns=("choice", *(f"{name}_graph_us" for name in _SHOWN), *(f"{name}_graph_ratio" for name in _SHOWN[1:])),
    needs=(SLICE,), share=1.5,
)  # fmt: skip
