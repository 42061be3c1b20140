"""The same all-reduce by tricomm, torch's symmetric memory, NCCL and kraken, ranks as processes on one GPU.

Processes take turns on a device in slices of time, which is most of what is measured: compare within a case only.
A `ratio` is a contender's time over that of tricomm's own choice, round by round: above 1, tricomm is the faster one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from tricomm.perf.bench_row import OURS
from tricomm.perf.evidence import machine
from tricomm.perf.evidence.comparison import offered
from tricomm.perf.evidence.stage import SLICE, Case, Data, Settings, Stage, Wrong
from tricomm.perf.workers import RankFailed, talk

SIZES = (8 << 10, 64 << 10, 512 << 10, 4 << 20)
FIRST_SIZE = SIZES[1]
_RANKS = "tricomm.perf.evidence.peer_ranks"
_PATIENCE = 45.0  # seconds of silence after which a rank is given up; starting one takes many of them
_LIMIT = 112.0  # of a comparison: what the case that it is in still gets to see
_DRY = {"calls": 2, "rounds": 2, "seconds": 10.0}
_GPU = {"calls": 10, "rounds": 15, "seconds": 30.0}
_SHOWN = (OURS, "symm_mem_one_shot", "symm_mem_two_shot", "nccl", "kraken_one_shot", "kraken_two_shot")

Lost = dict[str, str]  # contenders at which ranks were lost, and how
Row = dict[str, Any]  # what the ranks say about one size: count, choice, missing, times by contender


def _cases(settings: Settings) -> Iterable[Case]:
    dry = settings.dry_run
    for world_size in (2,) if dry else (2, 4):
        lost: Lost = {}  # what has cost one case its ranks costs the others none
        for nbytes in (64,) if dry else SIZES:
            yield Case(
                f"all_reduce/{world_size} ranks/{nbytes} bytes",
                partial(_run, settings, world_size, nbytes, lost),
                tier=(0 if world_size == 2 else 2) if nbytes in (64, FIRST_SIZE) else 3 if world_size == 2 else 5,
            )


def _run(settings: Settings, world_size: int, nbytes: int, lost: Lost) -> Data:
    question = asked(settings, "all_reduce", "bfloat16", (nbytes,), world_size, one_gpu=True)
    row = compare(question, world_size, lost)[nbytes]
    return {"nbytes": nbytes, "choice": row["choice"], **described(row["times"]), "missing": row["missing"]}


def asked(
    settings: Settings, collective: str, dtype: str, sizes: tuple[int, ...], world_size: int, one_gpu: bool
) -> dict[str, Any]:
    """What `peer_ranks` is to do; every name that is offered takes part."""
    return {
        "collective": collective, "dtype": dtype, "sizes": list(sizes), "graphs": collective != "barrier",
        "names": list(offered(collective, world_size, settings.dry_run)), "dry_run": settings.dry_run,
        "one_gpu": one_gpu, "peers": str(settings.peers) if settings.peers else None,
        **(_DRY if settings.dry_run else _GPU),
    }  # fmt: skip


@dataclass
class _Heard:
    """What the ranks have said: where they are, and the rows that are complete, of the slowest rank each."""

    world_size: int
    at: str | None = None
    parts: dict[int, list[Row]] = field(default_factory=dict)

    def take(self, record: dict[str, Any]) -> None:
        if record["what"] == "times":
            self.parts.setdefault(record["size"], []).append(record)
        else:
            self.at = record["name"]

    def rows(self) -> dict[int, Row]:
        found = {}
        for size, parts in self.parts.items():
            if len(parts) == self.world_size:
                slowest = {
                    name: [max(each) for each in zip(*(part["times"][name] for part in parts), strict=True)]
                    for name in parts[0]["times"]
                }
                found[size] = {**parts[0], "times": slowest}
        return found


def compare(question: dict[str, Any], world_size: int, lost: Lost) -> dict[int, Row]:
    """Have ranks compare; a row per size. Raises `Wrong` where tricomm did not run, or was not right.

    A contender at which a rank dies or falls silent is put into `lost`, and the others start again without it.
    """
    end = time.monotonic() + _LIMIT
    while True:
        names = [name for name in question["names"] if name not in lost]
        heard = _Heard(world_size)
        try:
            for _, record in talk(_RANKS, world_size, {**question, "names": names}, min(_PATIENCE, _left(end, lost))):
                _left(end, lost)
                heard.take(record)
                rows = heard.rows()
                if len(rows) == len(question["sizes"]):
                    return {size: _judged(row, question["names"], lost) for size, row in rows.items()}
            raise Wrong("the ranks have ended without a result")
        except RankFailed as error:
            name = (heard.at or OURS).removesuffix("_graph")
            if name.startswith(OURS):
                raise Wrong(f"at {heard.at or 'the start'}: {error}") from None
            lost[name] = f"ranks were lost at it: {error}"[:400]


def _left(end: float, lost: Lost) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise Wrong(f"no result within {_LIMIT:g} s; ranks were lost at {', '.join(lost) or 'nothing'}")
    return left


def _judged(row: Row, names: Iterable[str], lost: Lost) -> Row:
    """The row, with those that were lost among the missing ones; a kernel may refuse a call that is not for it."""
    for name, why in row["missing"].items():
        refused = why.startswith("InvalidArgument") and name.removesuffix("_graph") != OURS
        if name.startswith(OURS) and not refused:
            raise Wrong(f"{name}: {why}")
    return {**row, "missing": {**row["missing"], **{name: why for name, why in lost.items() if name in names}}}


def described(times: dict[str, list[float]]) -> Data:
    """Flat numbers of each contender: median, 10th and 90th of 100, and the ratio to tricomm's own choice."""
    data: Data = {"rounds": len(times[OURS])}
    for name, samples in times.items():
        spread = machine.spread(samples)
        data |= {f"{name}_{key}us": spread[f"{long}_us"] for key, long in
                 (("", "median"), ("p10_", "p10"), ("p90_", "p90"))}  # fmt: skip
        base = f"{OURS}_graph" if name.endswith("_graph") else OURS
        if name != base:
            data[f"{name}_ratio"] = round(median(a / b for a, b in zip(samples, times[base], strict=True)), 3)
    return data


STAGE = Stage(
    "peers", "All-reduce beside other libraries, ranks as processes on one GPU", _cases, machine.no_gpu,
    columns=("choice", *(f"{name}_graph_us" for name in _SHOWN), *(f"{name}_graph_ratio" for name in _SHOWN[1:])),
    needs=(SLICE,), share=1.5,
)  # fmt: skip
