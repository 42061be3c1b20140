"""Imports go one way, as pyproject.toml's contract says; and the contract does bite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.wheel_gate import ROOT


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; c()"
    return subprocess.run(
        [sys.executable, "-P", "-c", script, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_imports_go_one_way() -> None:
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


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
