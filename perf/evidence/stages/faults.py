"""Faults of ranks that are processes on one GPU (killed, stopped, diverging), and how soon the other rank notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tricomm
from tricomm.errors import TricommError
from tricomm.perf.evidence import hardware
from tricomm.perf.evidence.stage import KILL, Data, EvidenceSettings, Stage, StageCase, Wrong
from tricomm.perf.workers import RankFailed, run_workers

# The fault of rank 1: the error that rank 0 must get, and within how many seconds.
_RANK = "tricomm.perf.evidence.stages.faults:rank_main"
STALL = 3.0
KILLED = "killed"
FAULTS = {KILLED: ("PeerDied", 2.0), "stopped": ("PeerStalled", STALL + 1.0), "diverging": ("CollectiveMismatch", 2.0)}
_SLACK = 1.0  # seconds more in a dry run, whose processes share the cores with other work


def _cases(settings: EvidenceSettings) -> Iterable[StageCase]:
    for name in FAULTS:
        if name != KILLED:  # which is a case of stage `first`
            yield StageCase(f"{name}/2 ranks", partial(run, name, settings))


def run(name: str, settings: EvidenceSettings) -> Data:
    """Make rank 1 fail, and read rank 0's error. Raises `Wrong` if that is another error, or too late."""
    with tempfile.TemporaryDirectory(prefix="tricomm-evidence-") as folder:
        settings_of_ranks = {"fault": name, "dry_run": settings.dry_run, "folder": folder, "stall": STALL}
        with suppress(RankFailed):  # rank 1 is meant to fail
            list(run_workers(_RANK, 2, settings_of_ranks, 60.0))
        outcome = Path(folder) / "rank0.json"
        if not outcome.exists():
            raise Wrong("rank 0 has reported no outcome")
        return judged(name, json.loads(outcome.read_text()), settings.dry_run)


def judged(name: str, outcome: dict[str, Any], dry_run: bool) -> Data:
    """Compare rank 0's outcome with the promise. Raises `Wrong`."""
    kind, within = FAULTS[name]
    if outcome["error"] != kind:
        raise Wrong(f"rank 0 got {outcome['error']}, expected {kind}: {outcome['text']}")
    if outcome["after_s"] > within + (_SLACK if dry_run else 0.0):
        raise Wrong(f"rank 0 knew after {outcome['after_s']:.2f} s, expected {within:g} s")
    return {"error": kind, "after_s": round(outcome["after_s"], 3), "within_s": within}


def rank_main(emit: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """One rank, a process of its own: calls until rank 1 fails after a second; rank 0 records its error and the time.

    The monotonic clock is the same for all processes.
    """
    device = hardware.begin_rank(rank, data)
    options = tricomm.Options(timeout=30.0, stall_timeout=data["stall"], arena_bytes=1 << 20, share_device=True)
    mark, end = Path(data["folder"]) / "began", time.monotonic() + 40.0
    with tricomm.init(url, rank, world_size, device, options=options) as comm:
        x = torch.zeros(100, device=device)
        comm.all_reduce(x)
        comm.barrier()
        fails_at = time.monotonic() + 1.0
        try:
            while time.monotonic() < end:
                if rank == 1 and time.monotonic() > fails_at:
                    mark.write_text(str(time.monotonic()))
                    _fail(data["fault"], comm, data["stall"] * 2.5)
                comm.all_reduce(x)
                comm.synchronize()
            outcome = {"error": "nothing", "text": "no error within 40 s"}
        except TricommError as error:
            outcome = {"error": type(error).__name__, "text": str(error)}
        if rank == 0:
            after = time.monotonic() - float(mark.read_text()) if mark.exists() else -1.0
            partial = Path(data["folder"]) / "rank0.part"
            partial.write_text(json.dumps({**outcome, "after_s": after}))
            partial.rename(partial.with_suffix(".json"))


def _fail(fault: str, comm: tricomm.Communicator, stopped_s: float) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        resume = f"import os, time, signal; time.sleep({stopped_s}); os.kill({os.getpid()}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-c", resume])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        comm.all_reduce(torch.zeros(101, device=comm.device))


STAGE = Stage(
    "faults", "Faults are named in time", _cases, hardware.no_gpu, columns=("error", "after_s", "within_s"),
    needs=(KILL,),
)  # fmt: skip
