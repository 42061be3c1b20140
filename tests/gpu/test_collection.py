"""The GPU tests start where only torch, triton, pytest and cuda-bindings are installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING = "greenlet plotly selenium click rich hypothesis prometheus_client xdist pytest_timeout".split()


def collected(folder, missing, *where):
    """The output of pytest, which finds the GPU tests of `where` without the packages `missing`."""
    for name in missing:  # also in processes that the tests start
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r}, name={name!r})\n")
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", *where],
        cwd=ROOT,
        env=os.environ | alone,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout + done.stderr


def test_they_start_without_any_other_package(tmp_path):
    code, said = collected(tmp_path, MISSING, "tests/gpu")
    assert code == 0, said
    for file in (ROOT / "tests" / "gpu").rglob("test_*.py"):
        named = f"{file.relative_to(ROOT)}::" in said
        assert "mark.gpu" not in file.read_text() or file == Path(__file__) or named, said


def test_a_package_that_they_would_need_is_found(tmp_path):
    code, said = collected(tmp_path, ["triton"], "tests/gpu/test_times_gpu.py")
    assert code != 0 and "triton" in said


def test_no_gpu_test_is_anywhere_else():
    marked = re.compile(r"(?:@|pytestmark = \[?|[ (,])pytest\.mark\.gpu\b")
    files = [file for file in (ROOT / "tests").rglob("*.py") if marked.search(file.read_text())]
    assert all(file.is_relative_to(ROOT / "tests" / "gpu") for file in files)
