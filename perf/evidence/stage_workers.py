"""Processes that run cases, one per stage: a case that crashes or hangs costs itself, and not the others.

A process lives as long as its stage has cases, because starting one and its device takes seconds.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import tricomm
from tricomm.perf.evidence.stage import Case, Settings, Stage

LOG = "log.txt"  # what all of them print
_SAID = 600  # characters of a lost process's last words
_STARTING, _ENDING = 90.0, 5.0  # seconds


@dataclass(frozen=True)
class Outcome:
    """What became of a case. `started` is False if its process could not even begin."""

    status: str
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    started: bool = True


class Workers:
    """Runs cases; has to be closed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: dict[str, _Process] = {}

    def run(self, stage: Stage, case: Case, left: float) -> Outcome:
        """Run a case in its stage's process within the case's limit, and within `left` seconds, the start of the
        process included."""
        process = self._processes.get(stage.name)
        if process is None:
            process = self._processes[stage.name] = _Process(stage, self._settings)
        outcome = process.run(case, left)
        if outcome.status in ("crashed", "timeout"):
            self.end(stage)
        return outcome

    def knows(self, settings: Settings) -> None:
        """Processes that start from here on are told these."""
        self._settings = settings

    def end(self, stage: Stage) -> None:
        """End a stage's process, if there is one."""
        process = self._processes.pop(stage.name, None)
        if process is not None:
            process.end()

    def close(self) -> None:
        while self._processes:
            self._processes.popitem()[1].end()


class _Process:
    def __init__(self, stage: Stage, settings: Settings) -> None:
        asked = json.dumps(asdict(settings), default=str)
        self._path = settings.out / LOG
        self._ready = False
        with self._path.open("ab") as log:
            self._from = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tricomm.perf.evidence.stage_worker", stage.reference or stage.name, asked],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env=environment(stage), text=True,
            )  # fmt: skip
        self._input, self._output = _both(self._process)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            self._lines.put(line)
        self._lines.put("")  # the end

    def run(self, case: Case, left: float) -> Outcome:
        end = time.monotonic() + left
        try:
            self._input.write(json.dumps(case.key) + "\n")
            self._input.flush()
        except BrokenPipeError:
            pass  # its end is about to be read
        limit = _STARTING
        try:
            self._ready = self._ready or bool(self._lines.get(timeout=min(left, limit)))
            limit = case.limit
            line = self._ready and self._lines.get(timeout=max(0.0, min(limit, end - time.monotonic())))
        except queue.Empty:
            what = "end" if self._ready else "start"
            return Outcome("timeout", f"no {what} within {limit:g} s; {self._words()}", {}, self._ready)
        if line:
            self._from = self._path.stat().st_size
            return Outcome(**json.loads(line))
        return Outcome("crashed", f"exit code {self._process.wait()}: {self._words()}", {}, self._ready)

    def _words(self) -> str:
        with self._path.open("rb") as said:
            said.seek(self._from)
            return " | ".join(said.read().decode(errors="replace").strip().splitlines()[-6:])[-_SAID:]

    def end(self) -> None:
        """End it and whatever it has started, which is in its session."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._reader.join(_ENDING)
        self._output.close()
        try:
            self._input.close()
        except BrokenPipeError:
            pass


def _both(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    return process.stdin, process.stdout  # type: ignore[return-value]  # both are pipes


def environment(stage: Stage) -> dict[str, str]:
    """Of a stage's process: what the stage sets goes before what the caller has set."""
    root = str(Path(tricomm.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, **stage.environment, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
