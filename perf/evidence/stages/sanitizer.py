"""NVIDIA's compute-sanitizer over a few small calls: accesses out of bounds (memcheck), races in shared memory
(racecheck). It slows kernels by orders of magnitude, so only small calls of streams of one process are run under it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tricomm.perf.evidence import machine
from tricomm.perf.evidence.stage import Case, Data, Settings, Skip, Stage, Wrong

TOOL = "compute-sanitizer"
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


def missing(settings: Settings) -> str | None:
    """Why none of this can run."""
    return "a dry run has no GPU to watch" if settings.dry_run else machine.no_gpu(settings)


def _cases(settings: Settings) -> Iterable[Case]:
    for tool in ("memcheck", "racecheck"):
        yield Case(tool, lambda tool=tool: _run(tool), limit=400.0)  # type: ignore[misc]


def _run(tool: str) -> Data:
    found = shutil.which(TOOL) or shutil.which(TOOL, path=":".join(_PLACES))
    if found is None:
        raise Skip(f"{TOOL} is not on PATH, nor in {' or '.join(_PLACES)}")
    with tempfile.TemporaryDirectory(prefix="tricomm-evidence-") as folder:
        log = Path(folder) / "log"
        command = [found, "--tool", tool, "--error-exitcode", "9", "--log-file", str(log)]
        small = [sys.executable, "-m", "tricomm.perf.evidence.small_calls"]
        done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=390)
        text = log.read_text(errors="replace") if log.exists() else ""
    return judged(done.returncode, text, done.stdout + done.stderr)


def judged(code: int, log: str, said: str) -> Data:
    """The tool's verdict; raises `Wrong` where it has found something, or where the calls under it failed."""
    summary = [line.strip("= ") for line in log.splitlines() if "SUMMARY" in line]
    if code != 0 or not summary:
        raise Wrong(f"exit code {code}: {' | '.join(log.splitlines()[:8]) or said[-500:]}")
    return {"summary": summary[-1]}


STAGE = Stage("sanitizer", "compute-sanitizer finds nothing", _cases, missing, columns=("summary",))
