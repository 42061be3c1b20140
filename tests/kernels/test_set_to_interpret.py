"""TRITON_INTERPRET=1, which users set for their own kernels, changes nothing on a CPU and is named on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tricomm.c10d import capabilities
from tricomm.core import bootstrap
from tricomm.kernels.launch import triton_adapter
from tricomm.options import Options


def _with_the_variable(*command: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, cwd=root, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_everything_works_under_the_variable():
    result = json.loads(_with_the_variable("tests.kernels.set_to_interpret"))
    assert result.pop("compile").startswith("TRITON_INTERPRET is set: Triton compiles nothing for a GPU")
    assert result == {
        "simulate": [True] * 3,
        "check": True,
        "ranks": [True] * 2,
        "group": [True] * 2,
        "own": True,
        "interpreted": True,
        "errors": ["AttributeError", "InterpreterError"],
    }


def test_kernels_are_compiled_under_the_variable():
    text = _with_the_variable("tricomm", "kernels", "--kernel", "barrier", "--arch", "sm_90")
    assert "1 variants, 0 break a bar" in text


def test_a_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(bootstrap, "pick_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(triton_adapter, "interpreted", lambda: True)
    with pytest.raises(tricomm.InvalidArgument, match="on a GPU: TRITON_INTERPRET is set"):
        tricomm.Communicator(HashStore(), 0, 1)
    agreed = capabilities._conclude([capabilities._own_capabilities(Options())], None)
    assert "TRITON_INTERPRET" in agreed.no_kernels["cuda"]
    monkeypatch.setattr(triton_adapter, "interpreted", lambda: False)
    assert capabilities._conclude([capabilities._own_capabilities(Options())], None).no_kernels["cuda"] is None
