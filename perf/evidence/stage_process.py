"""The processes that run cases, one per stage, so that a case that crashes or hangs costs only itself.

A process lives as long as its stage has cases, because starting one and its device takes seconds. It gets a case's key
and the time that is left as a line of JSON on standard input, and returns the outcome as a line of JSON on standard
output.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import tricomm
from tricomm.perf.evidence import compiling
from tricomm.perf.evidence.stage import EvidenceSettings, Skip, Stage, StageCase
from tricomm.perf.evidence.stages import find
from tricomm.perf.workers import end_with_parent, json_lines_only

LOG = "log.txt"  # what all processes print
_LAST_WORDS = 600  # characters of a lost process's output
_STARTING, _ENDING = 90.0, 5.0  # seconds
UNCOMPILED = "uncompiled"


@dataclass(frozen=True)
class CaseOutcome:
    """The outcome of a case. `started` is False if its process could not start."""

    status: str
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    started: bool = True


class StageProcesses:
    """Runs cases in the processes of their stages; has to be closed."""

    def __init__(self, settings: EvidenceSettings) -> None:
        self._settings = settings
        self._processes: dict[str, _StageProcess] = {}

    def run(self, stage: Stage, case: StageCase, remaining: float) -> CaseOutcome:
        """Run a case within its limit and within `remaining` seconds, the start of the process included."""
        process = self._processes.get(stage.name)
        if process is None:
            process = self._processes[stage.name] = _StageProcess(stage, self._settings)
        outcome = process.run(case, remaining)
        if outcome.status in ("crashed", "timeout"):
            self.end(stage)
        return outcome

    def update(self, settings: EvidenceSettings) -> None:
        """Settings for processes that start after this."""
        self._settings = settings

    def end(self, stage: Stage) -> None:
        """End a stage's process, if there is one."""
        process = self._processes.pop(stage.name, None)
        if process is not None:
            process.end()

    def close(self) -> None:
        while self._processes:
            self._processes.popitem()[1].end()


class _StageProcess:
    def __init__(self, stage: Stage, settings: EvidenceSettings) -> None:
        self._log = settings.out / LOG
        self._ready = False
        name, described = stage.reference or stage.name, json.dumps(asdict(settings), default=str)
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tricomm.perf.evidence.stage_process", name, described],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=environment(stage),
                text=True,
            )
        self._input: IO[str] = self._process.stdin  # type: ignore[assignment]  # both are pipes
        self._output: IO[str] = self._process.stdout  # type: ignore[assignment]
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            self._lines.put(line)
        self._lines.put("")  # the end

    def run(self, case: StageCase, remaining: float) -> CaseOutcome:
        end = time.monotonic() + remaining
        with suppress(BrokenPipeError):  # the process has ended, which the reader sees
            self._input.write(json.dumps([case.key, remaining]) + "\n")
            self._input.flush()
        limit = _STARTING
        try:
            self._ready = self._ready or bool(self._lines.get(timeout=min(remaining, limit)))
            limit = case.limit + (0.0 if case.jobs is list else compiling_limit(case, remaining))
            line = self._ready and self._lines.get(timeout=max(0.0, min(limit, end - time.monotonic())))
        except queue.Empty:
            missing = "end" if self._ready else "start"
            return CaseOutcome("timeout", f"no {missing} within {limit:g} s; {self._last_words()}", {}, self._ready)
        if line:
            self._log_start = self._log.stat().st_size
            return CaseOutcome(**json.loads(line))
        return CaseOutcome("crashed", f"exit code {self._process.wait()}: {self._last_words()}", {}, self._ready)

    def _last_words(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return " | ".join(log.read().decode(errors="replace").strip().splitlines()[-6:])[-_LAST_WORDS:]

    def end(self) -> None:
        """End the process and all processes in its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_ENDING)
        self._output.close()
        with suppress(BrokenPipeError):
            self._input.close()


def environment(stage: Stage) -> dict[str, str]:
    """Variables of a stage's process; the stage's own replace the caller's."""
    root = str(Path(tricomm.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, **stage.environment, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


def compiling_limit(case: StageCase, remaining: float) -> float:
    """Seconds for the case's variants, so that the case has its own time behind that."""
    return min(compiling.LIMIT, max(remaining - case.limit, remaining / 2))


def run_case(case: StageCase, settings: EvidenceSettings, remaining: float = math.inf) -> dict[str, Any]:
    """Run a case in this process: its status, reason and data. `uncompiled`: its variants took too long."""
    data, status, reason = {}, "ok", ""
    began = time.monotonic()
    try:
        jobs = case.jobs()
        compiling.all_of(jobs, settings.dry_run, compiling_limit(case, remaining))
        compiled = {"variants": len(jobs), "compile_s": round(time.monotonic() - began, 3)} if jobs else {}
        data = {**case.run(), **compiled}
    except Skip as missing:
        status, reason = "skipped", str(missing)
    except compiling.Uncompiled as late:
        status, reason = UNCOMPILED, str(late)
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
    return {"status": status, "reason": reason[:2000], "data": data}


def _main(name: str, described: str) -> int:
    """Be a stage's process: run the requested cases until standard input ends."""
    end_with_parent()  # a case that hangs must not outlive the command
    out = json_lines_only()
    fields = json.loads(described)
    fields |= {"out": Path(fields["out"]), "peers": Path(fields["peers"]) if fields["peers"] else None}
    settings = EvidenceSettings(**fields)
    cases = {case.key: case for case in find(name).cases(settings)}
    out.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        key, remaining = json.loads(line)
        out.write(json.dumps(run_case(cases[key], settings, remaining)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
