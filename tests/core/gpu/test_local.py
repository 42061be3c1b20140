"""Ranks as streams of one process: what the driver must have been told. The rest needs a GPU (test_gpu.py)."""

import os
import subprocess
import sys

import pytest
import torch

from tricomm import errors, local

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def started(monkeypatch):
    """CUDA has started, or has not."""

    def now(whether, connections):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: whether)
        monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
        monkeypatch.delenv(CONNECTIONS, raising=False)
        if connections is not None:
            monkeypatch.setenv(CONNECTIONS, connections)

    return now


@pytest.mark.parametrize(
    ("world_size", "whether", "connections", "needed"),
    [
        (2, True, None, None),
        (3, True, None, 12),
        (8, True, None, 32),
        (8, True, "16", 32),
        (8, True, "32", None),
        (4, True, "16", None),
        (4, True, "15", 16),
        (8, False, "8", 32),
        (8, False, None, None),
        (1, True, "1", None),
    ],
)
def test_more_ranks_than_hardware_queues_are_refused(started, world_size, whether, connections, needed):
    started(whether, connections)
    words = f"need {needed} hardware queues" if needed is not None else "on a CPU a call returns only"
    with pytest.raises(errors.InvalidArgument, match=words):
        local(world_size, "cpu")


@pytest.mark.parametrize("whether", [False, True])
def test_what_the_driver_reads_is_set_before_it_starts_and_only_then(started, whether):
    started(whether, None)
    with pytest.raises(errors.InvalidArgument):
        local(8, "cpu")
    assert os.environ.get(CONNECTIONS) == (None if whether else "32")
    assert os.environ.get("CUDA_MODULE_LOADING") == (None if whether else "EAGER")


@pytest.mark.parametrize(("marks", "value"), [("gpu", "32"), ("not gpu and not soak", None), ("soak", None)])
def test_the_gpu_tests_set_it_for_themselves(marks, value):
    code = (
        "import os; from types import SimpleNamespace as N; from tests.conftest import pytest_configure as go; "
        f"go(N(option=N(markexpr={marks!r}))); print(os.environ.get({CONNECTIONS!r}))"
    )
    env = {name: value for name, value in os.environ.items() if name != CONNECTIONS}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(value)
