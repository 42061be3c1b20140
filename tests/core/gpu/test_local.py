"""Ranks as streams of one process: the driver's variables. The rest needs a GPU (test_gpu.py)."""

import os

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
def test_variables_that_the_driver_reads_are_set_only_before_it_starts(started, whether):
    started(whether, None)
    with pytest.raises(errors.InvalidArgument):
        local(8, "cpu")
    assert os.environ.get(CONNECTIONS) == (None if whether else "32")
    assert os.environ.get("CUDA_MODULE_LOADING") == (None if whether else "EAGER")
