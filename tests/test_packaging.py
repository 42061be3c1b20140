"""The wheel: built from an sdist of this checkout, complete, nothing beside the package, importable from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import wheel_gate

ROOT = wheel_gate.ROOT
BUILD = """
import sys, tarfile
from setuptools import build_meta
folder = sys.argv[1]  # setuptools puts its own arguments there
sdist = build_meta.build_sdist(folder)
tarfile.open(folder + "/" + sdist).extractall(folder + "/from", filter="data")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from an sdist made from a copy of the checkout, which it must not touch."""
    work = tmp_path_factory.mktemp("package")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("tricomm", *wheel_gate.ROOMS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    _python(source, "-c", BUILD, str(work))
    unpacked = next((work / "from").iterdir())
    _python(unpacked, "-c", "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])", str(work))
    return next(work.glob("*.whl"))


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def test_the_wheel_is_complete_and_has_no_generic_names(wheel: Path) -> None:
    assert wheel_gate.content(wheel) == []
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize(
    "lost",
    [
        "tricomm/kernels/collectives/registry.py",
        "tricomm/py.typed",
        "tricomm/tables/default.json",
        "tricomm/perf/dashboard/page/page.js",
    ],
)
def test_the_gate_finds_what_lacks(wheel: Path, tmp_path: Path, lost: str) -> None:
    assert lost in " ".join(wheel_gate.content(_rewritten(wheel, tmp_path, without=lost)))


def test_the_gate_finds_a_generic_name(wheel: Path, tmp_path: Path) -> None:
    assert "kernels/x.py would land" in " ".join(wheel_gate.content(_rewritten(wheel, tmp_path, extra="kernels/x.py")))


def _rewritten(wheel: Path, folder: Path, without: str = "", extra: str = "") -> Path:
    changed = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if name != without:
                new.writestr(name, old.read(name))
        if extra:
            new.writestr(extra, "")
    return changed


def test_every_module_imports_from_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    gate = shutil.copy(ROOT / "tests" / "wheel_gate.py", tmp_path)
    # -P and this path: neither the checkout nor an editable install of it may be what is imported.
    start = f"import sys, runpy; sys.path.insert(0, {str(site)!r}); sys.argv[1:] = ['imports', {str(site)!r}]; "
    done = _python(tmp_path, "-P", "-c", start + f"runpy.run_path({str(gate)!r}, run_name='__main__')")
    assert "ok" in done.stdout


def test_the_package_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
        entry = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    needed = [line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert [re.split(r"[^\w-]", line.split()[1])[0] for line in needed] == ["torch", "triton", "numpy"]
    assert all(f"Provides-Extra: {extra}" in text for extra in ("cli", "explorer", "cuda", "nccl"))
    assert "License-Expression: Apache-2.0" in text and "Requires-Python: >=3.11" in text
    assert "tricomm = tricomm.__main__:main" in entry
    assert "[vllm.general_plugins]\ntricomm = tricomm.engines.vllm_plugin:register" in entry


def test_the_licence_is_there_in_full() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and len(text) > 10_000


def test_the_rooms_are_relative_links() -> None:
    for room in wheel_gate.ROOMS:
        link = ROOT / "tricomm" / room
        assert link.is_symlink() and str(link.readlink()) == f"../{room}", link
