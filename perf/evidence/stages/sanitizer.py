"""NVIDIA's compute-sanitizer over a few small calls: memcheck for accesses out of bounds, racecheck for shared memory.

It slows kernels by orders of magnitude, so that the calls have to be small. Ranks are processes, because it may run the
kernels of one process one after another, and ours wait for each other. Modules are loaded when they are used, because
all code of a loaded module is instrumented, and torch has much.
"""

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
from tricomm.perf.evidence import hardware
from tricomm.perf.evidence.stage import SLICE, Data, EvidenceSettings, Skip, Stage, StageCase, Wrong

TOOL = "compute-sanitizer"
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_FIRST = "all_reduce"
_LIMIT = 200.0


def missing(settings: EvidenceSettings) -> str | None:
    """Why none of this can run, or None."""
    return "a dry run has no GPU to watch" if settings.dry_run else hardware.no_gpu(settings)


def _cases(settings: EvidenceSettings) -> Iterable[StageCase]:
    for tool, tier in (("memcheck", 1), ("racecheck", 2)):
        for world_size, collective, later in ((2, _FIRST, 0), (2, "", 2), (CUBE_RANKS, "", 5)):
            yield StageCase(
                f"{tool}/{collective or 'every kernel'}/{world_size} ranks",
                partial(_run, tool, world_size, collective),
                limit=_LIMIT,
                tier=tier + later,
            )


def command(tool: str, program: str, log: Path, world_size: int, collective: str) -> list[str]:
    """The command; every process has its own log."""
    watched = [sys.executable, "-m", "tricomm.perf.evidence.process_checks", str(world_size)]
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "9", "--log-file", f"{log}-%p"]
    return [program, *options, *watched, *([collective] if collective else [])]


def _run(tool: str, world_size: int, collective: str) -> Data:
    program = shutil.which(TOOL) or shutil.which(TOOL, path=":".join(_PLACES))
    if program is None:
        raise Skip(f"{TOOL} is not on PATH, nor in {' or '.join(_PLACES)}")
    with tempfile.TemporaryDirectory(prefix="tricomm-evidence-") as folder:
        arguments = command(tool, program, Path(folder) / "log", world_size, collective)
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_LIMIT - 10.0)
        logs = [path.read_text(errors="replace") for path in sorted(Path(folder).iterdir())]
    return judged(done.returncode, logs, done.stdout + done.stderr, world_size)


def judged(code: int, logs: list[str], output: str, world_size: int) -> Data:
    """The tool's verdict. Raises `Wrong` if it reports an error or did not watch every rank, or if a call failed."""
    verdicts = [(log, line.strip("= ")) for log in logs for line in log.splitlines() if "SUMMARY" in line]
    for log, line in verdicts:
        if re.search(r"SUMMARY: 0 ", line) is None:
            raise Wrong(f"{line}: {' | '.join(log.splitlines()[:8])}")
    if code != 0 or len(verdicts) < world_size:
        raise Wrong(f"exit code {code}, {len(verdicts)} verdicts of {world_size} ranks: {output[-500:]}")
    return {"summary": verdicts[-1][1]}


STAGE = Stage(
    "sanitizer", "compute-sanitizer finds nothing", _cases, missing, columns=("summary",),
    environment={"CUDA_MODULE_LOADING": "LAZY"}, needs=(SLICE,),
)  # fmt: skip
