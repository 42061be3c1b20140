"""docs/own-kernels.md shows the kernel of examples/own_kernel.py, and its commands print the lines on it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import triton

from tests import forked
from tests.wheel_gate import ROOT

PAGE = (ROOT / "docs" / "own-kernels.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
EXAMPLE = (ROOT / "examples" / "own_kernel.py").read_text()
[SHOWN] = [text for language, text in BLOCKS if language == "python"]
LINES = [line for language, text in BLOCKS if not language for line in text.splitlines()]
COMMANDS = [line.partition("  ")[0] for line in LINES if re.match("tricomm|torchrun", line)]
[REPORT] = [text for _, text in BLOCKS if text.startswith("race at ")]
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
COMPILED = (0, ["no finding in 5 schedules"]) if TRITON >= (3, 9) else (1, ["race at own_kernel.py:26", "PTX line"])
SAYS = {
    "tricomm check examples/own_kernel.py:racy": (1, [*REPORT.splitlines(), "1 finding(s) in 1 schedules"]),
    "tricomm check examples/own_kernel.py:ring --schedules 20": (0, ["no finding in 20 schedules"]),
    "tricomm check examples/own_kernel.py:racy --schedules 5 --compiled sm_90": COMPILED,
    "torchrun --nproc-per-node 2 examples/own_kernel.py": (0, ["rank 0: 102.0 from", "rank 1: 2.0 from"]),
}


def run(line: str) -> tuple[int, str]:
    program, *arguments = line.split()
    module = {"tricomm": ["tricomm"], "torchrun": ["torch.distributed.run", "--standalone"]}[program]
    env = {**os.environ, "PYTHONPATH": forked.python_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = forked.script("-m", *module, *arguments, env=env)
    return done.returncode, done.stdout + done.stderr


def test_the_page_shows_the_example_and_each_command_is_tested() -> None:
    assert SHOWN in EXAMPLE
    assert set(COMMANDS) == set(SAYS)


@pytest.mark.parametrize("line", SAYS)
def test_a_command_prints_the_output_that_the_page_shows(line: str) -> None:
    code, said = run(line)
    assert code == SAYS[line][0], said
    assert [text for text in SAYS[line][1] if text not in said] == [], said
    assert "Warning" not in said, said


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ("wait_flag(group, flags[RANK] + 1, number)", ["race at kernel.py"]),
        (
            "set_flag(flags[BEFORE] + 1, number)",
            ["deadlock at kernel.py:34", "(int64 [2]) byte 8", "expected 1, found 0"],
        ),
    ],
)
def test_a_kernel_without_one_of_its_lines(tmp_path: Path, lost: str, found: list[str]) -> None:
    """A race between two rounds, or a hang: the finding names the last wait and its word, not the one before."""
    assert EXAMPLE.count(lost) == 1
    text = EXAMPLE.replace(lost, "pass").replace("from common import LIMIT\n", "LIMIT = 5\n")
    (tmp_path / "kernel.py").write_text(text)
    code, said = run(f"tricomm check {tmp_path}/kernel.py:ring --schedules 20")
    assert code == 1 and [words for words in found if words not in said] == [], said
