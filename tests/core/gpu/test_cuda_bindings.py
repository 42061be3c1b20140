"""The supported versions of cuda-bindings, and that all code that calls the driver checks them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tricomm import cuda_bindings
from tricomm.core import nccl
from tricomm.cuda_bindings import load_bindings, refusal
from tricomm.errors import ResourceError
from tricomm.kernels.launch.cuda_launcher import TorchDevice
from tricomm.perf.system import doctor
from tricomm.store.cuda.cuda_driver import load_driver

ROOT = Path(__file__).parents[3]
TOO_OLD = ["11.8.7", "12.6.2.post1", "12.8.0", "12.9", "12.9.0", "12.9.0.post3", "12.9.1rc1", "12.9.1.dev4+g12ab"]
TOO_OLD += ["13.0.0a0", "13.0.0b1", "13.0.0rc2", "13.0.0.dev1", "13.0rc1"]
GOOD = ["12.9.1", "12.9.1.post1", "12.9.1+local", "12.9.2.dev1", "12.9.10", "12.10.0", "13.0.0", "13.0.0.post1"]
GOOD += ["13.0", "13.1.0b1", "13.4.1a0", "13.5.0", "14.0.0"]


@pytest.mark.parametrize("version", TOO_OLD)
def test_versions_that_keep_the_gil_are_refused(version: str) -> None:
    reason = refusal(version)
    assert reason is not None and version in reason and "GIL" in reason and "cuda-bindings>=12.9.1" in reason


@pytest.mark.parametrize("version", GOOD)
def test_versions_that_release_it_are_taken(version: str) -> None:
    assert refusal(version) is None


@pytest.mark.parametrize("version", ["", "unknown", "v13", "13"])
def test_a_version_that_cannot_be_read_is_refused(version: str) -> None:
    reason = refusal(version)
    assert reason is not None and "cannot be read" in reason and repr(version) in reason


def test_no_bindings_are_not_an_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert cuda_bindings.bindings_version() is None and refusal(None) is None


def test_both_lists_of_dependencies_need_the_same_version_of_the_bindings() -> None:
    asked = re.findall(r"cuda-bindings[^\"]*", (ROOT / "pyproject.toml").read_text())
    assert asked == [cuda_bindings.NEEDED] * 2
    assert cuda_bindings.NEEDED.endswith(".".join(map(str, cuda_bindings.FIRST)))


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings")
    monkeypatch.setattr(bindings, "__version__", "12.9.0")


REFUSED = r"cuda-bindings 12\.9\.0 .*GIL.*pip install 'cuda-bindings>=12\.9\.1'"


@pytest.mark.usefixtures("old")
def test_everything_that_calls_the_driver_refuses_old_bindings() -> None:
    load_driver.cache_clear()
    for use in (load_driver, lambda: TorchDevice(torch.device("cuda:0")), nccl._load):
        with pytest.raises(ResourceError, match=REFUSED):
            use()


@pytest.mark.usefixtures("old")
def test_doctor_prints_the_installed_and_the_needed_version() -> None:
    (finding,) = doctor._bindings()
    assert (finding.verdict, finding.remedy) == (doctor.FAIL, "pip install 'cuda-bindings>=12.9.1'")
    assert "12.9.0" in finding.text and "cuda-bindings>=12.9.1 is needed" in finding.text


def test_doctor_names_a_version_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("cuda.bindings"), "__version__", "12.9.1")
    (finding,) = doctor._bindings()
    assert finding.verdict == doctor.PASS and "cuda-bindings 12.9.1" in finding.text


@pytest.mark.usefixtures("old")
def test_without_the_check_old_bindings_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError):
        load_bindings("driver")
    monkeypatch.setattr(cuda_bindings, "refusal", lambda version: None)
    assert load_bindings("driver") is sys.modules["cuda.bindings.driver"]


def test_only_cuda_bindings_py_imports_the_bindings() -> None:
    pattern = re.compile(r"^\s*(from cuda[. ]|import cuda\b)|import_module\(f?\"cuda", re.MULTILINE)
    folders = [ROOT / name for name in ("tricomm", "kernels", "store", "perf")]
    results = {p.name for folder in folders for p in folder.rglob("*.py") if pattern.search(p.read_text())}
    assert results == {"cuda_bindings.py"}
