"""NVIDIA's compute-sanitizer over a few small calls: accesses out of bounds (memcheck), races in shared memory
(racecheck). It slows kernels by orders of magnitude, so only small calls are run under it. Ranks are processes: kernels
of one process may be made to run one after another, and ours wait for each other. Modules are loaded when they are
used, because each one that is loaded has all its code instrumented, and torch has much."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tricomm.kernels.collectives.registry import CUBE_RANKS
from tricomm.perf.evidence import machine
from tricomm.perf.evidence.stage import SLICE, Case, Data, Settings, Skip, Stage, Wrong

TOOL = "compute-sanitizer"
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_FIRST = "all_reduce"
_LIMIT = 200.0


def missing(settings: Settings) -> str | None:
    """Why none of this can run."""
    return "a dry run has no GPU to watch" if settings.dry_run else machine.no_gpu(settings)


def _cases(settings: Settings) -> Iterable[Case]:
    for tool, tier in (("memcheck", 1), ("racecheck", 2)):
        for world_size, collective, later in ((2, _FIRST, 0), (2, "", 2), (CUBE_RANKS, "", 5)):
            yield Case(
                f"{tool}/{collective or 'every kernel'}/{world_size} ranks",
                partial(_run, tool, world_size, collective), limit=_LIMIT, tier=tier + later,
            )  # fmt: skip


def command(tool: str, found: str, log: Path, world_size: int, collective: str) -> list[str]:
    """What is started; every process has a log of its own."""
    watched = [sys.executable, "-m", "tricomm.perf.evidence.small_calls", str(world_size)]
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "9", "--log-file", f"{log}-%p"]
    return [found, *options, *watched, *([collective] if collective else [])]


def _run(tool: str, world_size: int, collective: str) -> Data:
    found = shutil.which(TOOL) or shutil.which(TOOL, path=":".join(_PLACES))
    if found is None:
        raise Skip(f"{TOOL} is not on PATH, nor in {' or '.join(_PLACES)}")
    with tempfile.TemporaryDirectory(prefix="tricomm-evidence-") as folder:
        asked = command(tool, found, Path(folder) / "log", world_size, collective)
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_LIMIT - 10.0)
        logs = [path.read_text(errors="replace") for path in sorted(Path(folder).iterdir())]
    return judged(done.returncode, logs, done.stdout + done.stderr, world_size)


def judged(code: int, logs: list[str], said: str, world_size: int) -> Data:
    """The tool's verdict; raises `Wrong` if it has found something, if it has not watched every rank, or if the calls
    under it failed."""
    found = [(log, line.strip("= ")) for log in logs for line in log.splitlines() if "SUMMARY" in line]
    for log, line in found:
        if re.search(r"SUMMARY: 0 ", line) is None:
            raise Wrong(f"{line}: {' | '.join(log.splitlines()[:8])}")
    if code != 0 or len(found) < world_size:
        raise Wrong(f"exit code {code}, {len(found)} verdicts of {world_size} ranks: {said[-500:]}")
    return {"summary": found[-1][1]}


STAGE = Stage(
    "sanitizer", "compute-sanitizer finds nothing", _cases, missing, columns=("summary",),
    environment={"CUDA_MODULE_LOADING": "LAZY"}, needs=(SLICE,),
)  # fmt: skip
