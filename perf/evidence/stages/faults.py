"""Faults, ranks as processes on one GPU: a killed, a stopped and a diverging one, and how soon the others know."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tricomm.perf.evidence import machine
from tricomm.perf.evidence.stage import KILL, Case, Data, Settings, Stage, Wrong
from tricomm.perf.workers import RankFailed, talk

# What rank 1 does, the error that rank 0 has to get, and in how many seconds.
STALL = 3.0
KILLED = "killed"
FAULTS = {
    KILLED: ("PeerDied", 2.0),
    "stopped": ("PeerStalled", STALL + 1.0),
    "diverging": ("CollectiveMismatch", 2.0),
}
_SLACK = 1.0  # of a dry run, whose processes share two cores with whatever else runs


def _cases(settings: Settings) -> Iterable[Case]:
    for name in FAULTS:
        if name != KILLED:  # which is among what runs first
            yield Case(f"{name}/2 ranks", partial(run, name, settings))


def run(name: str, settings: Settings) -> Data:
    """Have rank 1 go wrong, and hear what rank 0 got. Raises `Wrong` if that is not what it has to get, or too late."""
    with tempfile.TemporaryDirectory(prefix="tricomm-evidence-") as folder:
        asked = {"fault": name, "dry_run": settings.dry_run, "folder": folder, "stall": STALL}
        try:
            for _ in talk("tricomm.perf.evidence.fault_ranks", 2, asked, 60.0):
                pass
        except RankFailed:  # rank 1 is meant to fail
            pass
        said = Path(folder) / "rank0.json"
        if not said.exists():
            raise Wrong("rank 0 has not said what it got")
        return judged(name, json.loads(said.read_text()), settings.dry_run)


def judged(name: str, found: dict[str, Any], dry_run: bool) -> Data:
    """What rank 0 said, against what it has to get."""
    kind, within = FAULTS[name]
    if found["error"] != kind:
        raise Wrong(f"rank 0 got {found['error']}, expected {kind}: {found['text']}")
    if found["after_s"] > within + (_SLACK if dry_run else 0.0):
        raise Wrong(f"rank 0 knew after {found['after_s']:.2f} s, expected {within:g} s")
    return {"error": kind, "after_s": round(found["after_s"], 3), "within_s": within}


STAGE = Stage(
    "faults", "Faults are named in time", _cases, machine.no_gpu, columns=("error", "after_s", "within_s"),
    needs=(KILL,),
)  # fmt: skip
