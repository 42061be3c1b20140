"""The programs and commands of docs/getting-started.md run, and print what the page says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import forked
from tests.wheel_gate import ROOT

PAGE = (ROOT / "docs" / "getting-started.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PROGRAMS = {text.partition("\n")[0].removeprefix("# "): text for language, text in BLOCKS if language == "python"}
LINES = [line.partition("#") for _, text in BLOCKS for line in text.splitlines() if line.startswith("tricomm ")]
TESTED_ELSEWHERE = {"tricomm doctor"}
COMMANDS = [line.strip() for line, _, note in LINES if "on GPUs" not in note and line.strip() not in TESTED_ELSEWHERE]
SAYS = {
    "train_ddp.py": ["equal on all ranks: True"],
    "train_fsdp2.py": ["this rank holds 512 of 1024 elements"],
    "serve_layer.py": ["the sum is the residual: True", "close to torch: True"],
    "explain.py": ["all_reduce by one_shot/ll, 1 block of", "all_reduce by two_shot/simple, 1 block of"],
}
ALONE = {"explain.py"}


def script(*command: str) -> str:
    env = {**os.environ, "PYTHONPATH": forked.python_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = forked.script(*command, env=env, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_each_program_is_tested() -> None:
    assert set(PROGRAMS) == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_program(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(PROGRAMS[name])
    if name in ALONE:
        said = script(str(file))
    else:
        said = script("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file))
    assert [line for line in SAYS[name] if line not in said] == [], said


@pytest.mark.parametrize("line", COMMANDS)
def test_command(line: str, tmp_path: Path) -> None:
    folders = {f"XDG_{kind}_HOME": str(tmp_path) for kind in ("CACHE", "DATA", "STATE")}
    done = forked.command(*line.split()[1:], env={**os.environ, **folders, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
