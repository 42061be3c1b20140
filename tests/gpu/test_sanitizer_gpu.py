"""NVIDIA's compute-sanitizer over a few small calls: memcheck for accesses out of bounds, racecheck for shared memory.

    python -m tests.gpu.test_sanitizer_gpu WORLD [COLLECTIVE]

makes the calls. The tool slows kernels by orders of magnitude, so the calls are small. Ranks are processes, because it
may run the kernels of one process one after another, and ours wait for each other. Modules are loaded lazily, because
all code of a loaded module is instrumented, and torch has much. Run with `-m gpu`. Not yet run on hardware.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.exact import checks, process_bodies
from tricomm.kernels.collectives.registry import CUBE_RANKS
from tricomm.perf.workers import run_workers

TOOL = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
)
WATCHED = 150.0  # seconds that a call under the tool may take
LIMIT = 280.0
LAZILY = {"CUDA_MODULE_LOADING": "LAZY"}


def rank_main(emit, rank, world_size, url, names):
    """One rank, a process: the errors of a few small calls."""
    with process_bodies.join(rank, world_size, url, "one gpu", timeout=WATCHED, stall_timeout=WATCHED) as comm:
        for name in names:
            kernel = process_bodies.find(name)
            wanted = checks.calls(kernel, world_size, checks.FIRST_TYPE, True)
            emit("checked", wrong=checks.wrong(comm, kernel, torch.bfloat16, wanted))


def watched(world_size, collective):
    """Run the ranks; exit code 1 if a result is wrong."""
    kernels = [k for k in checks.kernels(world_size) if k.needs_cube == (world_size == CUBE_RANKS)]
    names = [k.name for k in kernels if collective in ("", k.collective)]
    replies = list(run_workers("tests.gpu.test_sanitizer_gpu:rank_main", world_size, names, LIMIT))
    bad = [text for _, reply in replies for text in reply["wrong"]]
    print("\n".join(bad))
    return 1 if bad or len(replies) != world_size * len(names) else 0


def command(program, tool, logs, world_size, collective):
    """The command; every process has its own log."""
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "9", "--log-file", f"{logs}/log-%p"]
    return [program, *options, sys.executable, "-m", "tests.gpu.test_sanitizer_gpu", str(world_size), collective]


def verdict(code, logs, output, world_size):
    """The defect of an outcome (an error, a rank that was not watched, a failed call) in words, or None."""
    verdicts = [(log, line.strip("= ")) for log in logs for line in log.splitlines() if "SUMMARY" in line]
    for log, line in verdicts:
        if re.search(r"SUMMARY: 0 ", line) is None:
            return f"{line}: {' | '.join(log.splitlines()[:8])}"
    if code != 0 or len(verdicts) < world_size:
        return f"exit code {code}, {len(verdicts)} verdicts of {world_size} ranks: {output[-500:]}"
    return None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not on PATH, nor in /usr/local/cuda")
@pytest.mark.parametrize(("world_size", "collective"), [(2, "all_reduce"), (2, ""), (CUBE_RANKS, "")])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool, world_size, collective, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    asked, at = command(TOOL, tool, logs, world_size, collective), Path(__file__).parents[2]
    done = subprocess.run(asked, cwd=at, env=os.environ | LAZILY, capture_output=True, text=True, timeout=LIMIT)
    texts = [path.read_text(errors="replace") for path in sorted(logs.iterdir())]
    assert verdict(done.returncode, texts, done.stdout + done.stderr, world_size) is None


def test_the_tool_watches_ranks_that_are_processes(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(
        globals(),
        "run_workers",
        lambda *how: asked.append(how) or [(n, {"wrong": []}) for n in range(2) for _ in how[2]],
    )
    assert command("it", "memcheck", tmp_path, 2, "all_reduce")[3:5] == ["--target-processes", "all"]
    assert watched(2, "all_reduce") == 0 and watched(3, "all_reduce") == 1
    assert asked[0][:2] == ("tests.gpu.test_sanitizer_gpu:rank_main", 2)
    assert set(asked[0][2]) == {k.name for k in checks.kernels(2) if k.collective == "all_reduce"}


def test_the_verdict_needs_every_rank_and_no_error():
    good, bad = "===== ERROR SUMMARY: 0 errors", "===== Invalid __global__ read\n===== ERROR SUMMARY: 1 error"
    races = "===== RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
    assert verdict(0, [good, good, ""], "", 2) is None
    for code, logs, words in (
        (0, [good, bad], "1 error: "),
        (0, [good, races], "2 hazards"),
        (1, [good, good], "exit code 1"),
        (0, [good], "1 verdicts of 2 ranks"),
    ):
        assert words in verdict(code, logs, "", 2)


if __name__ == "__main__":
    sys.exit(watched(int(sys.argv[1]), sys.argv[2]))
