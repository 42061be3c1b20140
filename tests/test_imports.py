"""Imports follow the contract in pyproject.toml, and the contract reports a violation."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheel_gate import ROOMS, ROOT


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; c()"
    return subprocess.run(
        [sys.executable, "-P", "-c", script, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_imports_go_one_way() -> None:
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("kernels/collectives/registry.py", "import tricomm.store"),
        ("store/__init__.py", "import tricomm.kernels.layout"),
        ("tricomm/communicator.py", "import tricomm.perf"),
        ("perf/bench/session.py", "import tricomm.cli"),
        ("perf/cost_model/forecast.py", "import tricomm.explorer.timing"),
        ("tricomm/core/group.py", "import tricomm.explorer"),
        ("tricomm/errors.py", "import tricomm.env"),
    ],
)
def test_an_import_the_wrong_way_is_found(tmp_path: Path, place: str, line: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("tricomm", *ROOMS):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / place).open("a") as file:
        file.write(f"\n{line}\n")
    done = _lint(tmp_path)
    assert done.returncode == 1 and re.search("[12] broken", done.stdout), done.stdout + done.stderr


def test_bare_room_names_are_banned() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", "perf/x.py", "-"],
        input="import kernels\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "TID251" in done.stdout, done.stdout + done.stderr
