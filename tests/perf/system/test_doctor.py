"""`tricomm doctor`: each verdict has a remedy, and a probe that raises hides no other."""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.store.cuda.fake_driver import FakeCuda
from tricomm.cli import cli
from tricomm.kernels.launch import interpreter
from tricomm.perf.system import doctor, info
from tricomm.perf.system.doctor import FAIL, PASS, WARN
from tricomm.store.arenas import open_arena


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path / "tables"))


def _verdicts() -> dict[str, str]:
    order = [PASS, WARN, FAIL]
    results: dict[str, str] = {}
    for finding in doctor.examine():
        assert bool(finding.remedy) == (finding.verdict != PASS), finding
        results[finding.name] = max(results.get(finding.name, PASS), finding.verdict, key=order.index)
    return results


def test_a_healthy_machine_and_the_command() -> None:
    result = _verdicts()
    assert result["a call"] == result["versions"] == result["shared memory"] == result["history"] == PASS
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    assert done.exit_code == 0
    assert {f["name"]: f["verdict"] for f in json.loads(done.output)["findings"]} == result
    assert "0 FAIL" in CliRunner().invoke(cli, ["doctor"]).output


def _refuse(*arguments: Any) -> Any:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("name", "place", "replacement", "verdict"),
    [
        ("shared memory", (os, "posix_fallocate"), _refuse, FAIL),
        ("pidfd", (os, "pidfd_open"), _refuse, WARN),
        ("open files", (resource, "getrlimit"), lambda what: (64, 4096), WARN),
        ("versions", (interpreter, "supported"), lambda: "Triton 9 is not tested", FAIL),
        ("a call", (torch, "equal"), lambda a, b: False, FAIL),
        ("a call", (torch, "arange"), _refuse, FAIL),
    ],
)
def test_missing_parts_are_found(
    name: str, place: tuple[Any, str], replacement: Any, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*place, replacement)
    result = _verdicts()
    assert result[name] == verdict and result["environment"] == PASS
    assert CliRunner().invoke(cli, ["doctor"]).exit_code == (1 if verdict == FAIL else 0)


NOTHING_SAID = """
TRICOMM_SOCKET_DIR=/nowhere TRICOMM_CUDA_VMM=? TRICOMM_STATS=often TRICOMM_STATS_EVERY=x TRICOMM_STATS_EVERY=-1
TRICOMM_ARENA_BYTES=7 TRICOMM_ARENA_BYTES=0 TRICOMM_CPU=kernel TRICOMM_CHECK=never TRICOMM_BLOCKING_WAIT=?
VLLM_TRICOMM=? SGLANG_TRICOMM=? TRICOMM_ENGINE_MAX_BYTES=-4 TRICOMM_P2P_DISABLE=?
"""


@pytest.mark.parametrize("setting", NOTHING_SAID.split())
def test_a_variable_without_an_effect_is_named(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*setting.split("="))
    assert list(doctor.PROBES["environment"]())[0].verdict == FAIL


def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_CHEK", "0")
    (found,) = doctor.PROBES["environment"]()
    assert (
        found.verdict == WARN and "did you mean TRICOMM_CHECK?" in found.text and found.remedy == "unset TRICOMM_CHEK"
    )


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "broken.json").write_text("{")
    (tmp_path / "data").write_text("a file where a directory should be")
    result = _verdicts()
    assert result["tuning tables"] == WARN and result["history"] == WARN


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    remedies = {f.name: f.remedy for f in doctor.PROBES["extras"]() if f.verdict == WARN}
    assert remedies["plotly"] == "pip install 'tricomm[report]'"


def test_gpus_without_links_or_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a > b)
    monkeypatch.setattr(doctor, "_missing", lambda module: True)
    results = {f.name: f for f in doctor.PROBES["devices"]()}
    assert (
        results["driver"].verdict == FAIL
        and "1 of 2 ordered pairs have none, such as (0, 1)" in results["peer access"].text
    )
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "unset" in {f.name: f.remedy for f in doctor.PROBES["devices"]()}["peer access"]


def test_the_kind_of_gpu_memory_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeCuda(2).process()
    monkeypatch.setattr(open_arena, "load_driver", lambda: driver)
    result, switch = doctor._gpu_memory(2)
    assert (result.verdict, result.text) == (PASS, "cuda_vmm: shared by descriptors")
    assert switch.verdict == PASS and switch.text.startswith("multicast addresses")
    driver.process.switch.supported = False
    _, switch = doctor._gpu_memory(2)
    assert "no reductions in the switch: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED is 0 for GPU" in switch.text
    driver.process.vmm.supported = False
    result, _ = doctor._gpu_memory(2)
    assert result.verdict == WARN and result.text.startswith("cuda_ipc: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY")
    monkeypatch.setenv("TRICOMM_CUDA_VMM", "0")
    result, _ = doctor._gpu_memory(2)
    assert result.text == "cuda_ipc: TRICOMM_CUDA_VMM=0" and "--ipc=host" in result.remedy
    monkeypatch.setattr(info.torch.cuda, "is_available", lambda: False)
    assert info.collect()["memory"].startswith("posix_shm, passed over sockets in ")
