"""The wheel, built from an sdist of this checkout: complete, only the package in it, importable from any directory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
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
USERS_SCRIPT = """
from typing import Any, assert_type
import torch
import tricomm
from tricomm.core.calls.fused_calls import Quantized

def calls(comm: tricomm.Communicator, x: torch.Tensor, w: tricomm.Symmetric, later: bool) -> torch.Tensor:
    xs = [x, x]
    assert_type(comm.all_reduce(x, "max", algorithm="one_shot"), torch.Tensor)
    assert_type(comm.all_reduce(x, async_op=False), torch.Tensor)
    assert_type(comm.all_reduce(x, async_op=True), tricomm.Work)
    assert_type(comm.all_reduce(x, async_op=later), Any)
    assert_type(comm.all_reduce(xs), list[torch.Tensor])
    assert_type(comm.all_reduce(xs, async_op=True), tricomm.Work)
    assert_type(comm.all_reduce(w), Any)  # w itself, because it is in place
    assert_type(comm.all_gather(x, w), tricomm.Symmetric)
    assert_type(comm.all_gather(x, out=x), torch.Tensor)
    assert_type(comm.reduce_scatter(w), torch.Tensor)
    assert_type(comm.all_to_all(x), torch.Tensor)
    assert_type(comm.all_to_all_v(x, [1, 2], [2, 1]), torch.Tensor)
    assert_type(comm.broadcast(x, 0), torch.Tensor)
    assert_type(comm.reduce(x, dst=0), torch.Tensor | None)
    assert_type(comm.gather(x, 0), torch.Tensor | None)
    assert_type(comm.scatter(None, 0, out=x), torch.Tensor)
    comm.scatter(None, 0, out=xs)
    comm.barrier()
    assert_type(comm.barrier(async_op=True), tricomm.Work)
    comm.send(w, 1)
    assert_type(comm.send(x, 1, async_op=True), tricomm.Work)
    assert_type(comm.recv(x, 1), int)
    assert_type(comm.recv(x, async_op=True), tricomm.Work)
    assert_type(comm.all_reduce_rms_norm(x, None, x), tuple[torch.Tensor, torch.Tensor])
    assert_type(comm.all_reduce_rms_norm_quantized(x, x, x, quantize="fp8"), Quantized)
    assert_type(comm.all_reduce_rms_norm_quantized(x, x, x, quantize="fp8", async_op=True), tricomm.Work)
    assert_type(comm.all_reduce_rows(x, print, 1, async_op=True), tricomm.Work)
    assert_type(comm.stats(), tricomm.Statistics)
    assert_type(tricomm.check(lambda comm: comm.rank, 2), tricomm.Report)
    comm.all_reduce("x")  # type: ignore[arg-type]
    comm.all_reduce(x, algorithm=1)  # type: ignore[call-overload]
    return comm.all_reduce(x)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from an sdist made from a copy of the checkout, which it must not touch."""
    work = tmp_path_factory.mktemp("package")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "tricomm", *wheel_gate.ROOMS):
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
def test_the_gate_finds_a_missing_file(wheel: Path, tmp_path: Path, lost: str) -> None:
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


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of mypy, for all tests here."""
    pytest.importorskip("mypy")
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.parametrize("editable", [False, True])
def test_a_users_script_passes_strict_checks(wheel: Path, tmp_path: Path, checked: Path, editable: bool) -> None:
    """Type checks find the package in a wheel and in the folder of an editable install."""
    site = ROOT / "src"
    if not editable:
        site = tmp_path / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    venv.create(tmp_path / "venv", symlinks=True)
    [packages] = tmp_path.glob("venv/lib/python*/site-packages")
    (packages / "paths.pth").write_text(f"{site}\n{sysconfig.get_path('purelib')}\n")
    (tmp_path / "script.py").write_text(USERS_SCRIPT)
    python = str(tmp_path / "venv" / "bin" / "python")
    _python(tmp_path, "-m", "mypy", "--strict", "--cache-dir", str(checked), "--python-executable", python, "script.py")


def test_an_editable_install_has_a_path_that_type_checkers_follow_and_no_generic_names(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("src", "out"):
        (tmp_path / name).mkdir()
    for name in ("tricomm", *wheel_gate.ROOMS):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "src" / "tricomm").symlink_to("../tricomm")
    _python(tmp_path, "-c", "import setuptools.build_meta as b; b.build_editable('out')")
    [made] = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        [name] = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert name.endswith(".pth") and archive.read(name).decode().split() == [str(tmp_path / "src")]
    assert [path.name for path in (ROOT / "src").iterdir() if path.suffix != ".egg-info"] == ["tricomm"]


def test_the_metadata_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
        entry = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    needed = [line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert [re.split(r"[^\w-]", line.split()[1])[0] for line in needed] == ["torch", "triton", "numpy"]
    assert all(f"Provides-Extra: {extra}" in text for extra in ("cli", "explorer", "cuda", "nccl"))
    assert "License-Expression: Apache-2.0" in text and "Requires-Python: >=3.11" in text
    assert "Author: tricomm developers" in text and "Keywords: collectives," in text
    assert text.count("Classifier: ") == 10
    assert "tricomm = tricomm.__main__:main" in entry
    assert "[vllm.general_plugins]\ntricomm = tricomm.engines.vllm_plugin:register" in entry


def test_the_full_licence_is_included() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and len(text) > 10_000


def test_the_rooms_are_relative_links() -> None:
    for room in wheel_gate.ROOMS:
        link = ROOT / "tricomm" / room
        assert link.is_symlink() and str(link.readlink()) == f"../{room}", link
    assert (ROOT / "src" / "tricomm").readlink() == Path("../tricomm")
