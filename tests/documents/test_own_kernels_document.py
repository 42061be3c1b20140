"""docs/own-kernels.md shows the kernel of examples/own_kernel.py, and each of its commands says what the page says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import forked
from tests.wheel_gate import ROOT

PAGE = (ROOT / "docs" / "own-kernels.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
EXAMPLE = (ROOT / "examples" / "own_kernel.py").read_text()
[SHOWN] = [text for language, text in BLOCKS if language == "python"]
LINES = [line for language, text in BLOCKS if not language for line in text.splitlines()]
COMMANDS = [line.partition("  ")[0] for line in LINES if re.match("tricomm|torchrun", line)]
[REPORT] = [text for _, text in BLOCKS if text.startswith("race at ")]
SAYS = {
    "tricomm check examples/own_kernel.py:racy": (1, [*REPORT.splitlines(), "1 finding(s) in 1 schedules"]),
    "tricomm check examples/own_kernel.py:ring --schedules 20": (0, ["no finding in 20 schedules"]),
    "tricomm check examples/own_kernel.py:racy --schedules 5 --compiled sm_90": (0, ["no finding in 5 schedules"]),
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
def test_a_command_says_what_the_page_says(line: str) -> None:
    code, said = run(line)
    assert code == SAYS[line][0], said
    assert [text for text in SAYS[line][1] if text not in said] == [], said
    assert "Warning" not in said, said


def test_without_the_last_wait_two_rounds_race(tmp_path: Path) -> None:
    last = "        wait_flag(group, flags[RANK] + 1, number)\n"
    assert EXAMPLE.count(last) == 1
    (tmp_path / "kernel.py").write_text(EXAMPLE.replace(last, "").replace("from common import LIMIT\n", ""))
    code, said = run(f"tricomm check {tmp_path}/kernel.py:ring --schedules 20")
    assert code == 1 and "race at kernel.py" in said, said
