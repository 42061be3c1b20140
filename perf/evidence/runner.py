"""Runs stages, each in a process of its own: one that crashes or hangs costs its case, not the others.

The process (`worker`) writes a line for each case that begins and ends. When it is lost, the case that had begun is
marked, and another process goes on with the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tricomm
from tricomm.perf.evidence import environment, journal
from tricomm.perf.evidence.journal import Journal
from tricomm.perf.evidence.stage import Settings, Stage

_LOOK = 0.2
_SAID = 600  # characters of a lost process's last words


def run(stage: Stage, settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Run what of `stage` has not been run yet; its result, which also lies in `settings.out` then."""
    notes = Journal.of(stage, settings)
    settings.out.mkdir(parents=True, exist_ok=True)
    notes.start(environment.facts(settings))
    missing = stage.missing(settings)
    if missing is not None:
        result = notes.result(stage, "skipped", missing, settings.dry_run)
    else:
        status, reason = _cases(stage, settings, say)
        result = Journal.of(stage, settings).result(stage, status, reason, settings.dry_run)
    journal.save(result, settings.out)
    return result


def _cases(stage: Stage, settings: Settings, say: Callable[[str], None]) -> tuple[str, str]:
    """("ok", "") when every case has had its turn, else what came in the way of that."""
    end = time.monotonic() + stage.limit
    lost: set[str] = set()
    while True:
        code, said = _worker(stage, settings, end, lost, say)
        if code == 0:
            return "ok", ""
        notes = Journal.of(stage, settings)
        late = time.monotonic() >= end
        if notes.begun is None:
            if late:
                return "timeout", f"the stage's {stage.limit:g} s were over; run it again to go on"
            return "crashed", f"exit code {code} outside of any case: {said}"
        status = "timeout" if code is None else "crashed"
        reason = f"no end within its limit; {said}" if code is None else f"exit code {code}: {said}"
        key = notes.begun
        notes.end(key, status, reason, 0.0, {})
        say(f"  {key}: {status}")
        lost.add(key)
        if late:
            return "timeout", f"the stage's {stage.limit:g} s were over at {key}; run it again to go on"


def _worker(
    stage: Stage, settings: Settings, end: float, lost: set[str], say: Callable[[str], None]
) -> tuple[int | None, str]:
    """The exit code of a process that runs cases (None: it was ended, a limit was over), and its last words."""
    asked = {"out": str(settings.out), "peers": str(settings.peers) if settings.peers else None,
             "dry_run": settings.dry_run, "lost": sorted(lost)}  # fmt: skip
    log = settings.out / f"{stage.name}.log"
    with log.open("ab") as file:
        start = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "tricomm.perf.evidence.worker", stage.reference or stage.name, json.dumps(asked)],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=_environment(),
        )  # fmt: skip
        try:
            code = _watch(process, stage, settings, end, say)
        finally:
            _end(process)
    with log.open("rb") as said:
        said.seek(start)
        return code, " | ".join(said.read().decode(errors="replace").strip().splitlines()[-6:])[-_SAID:]


def _watch(
    process: subprocess.Popen[bytes], stage: Stage, settings: Settings, end: float, say: Callable[[str], None]
) -> int | None:
    limits = {case.key: case.limit for case in stage.cases(settings)}
    told = len(Journal.of(stage, settings).ended)
    running, since = None, time.monotonic()
    while process.poll() is None:
        time.sleep(_LOOK)
        notes = Journal.of(stage, settings)
        for key, case in list(notes.ended.items())[told:]:
            say(f"  {key}: {case['status']}" + (f" ({case['reason']})" if case["reason"] else ""))
        told = len(notes.ended)
        now = time.monotonic()
        if notes.begun != running:
            running, since = notes.begun, now
        if now >= end or (running is not None and now - since > limits.get(running, stage.limit)):
            return None
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and whatever it has started, which is in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _environment() -> dict[str, str]:
    root = str(Path(tricomm.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    return {**queues, **os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
