"""The c10d backend, and a communicator with NCCL as its fallback, on one real GPU. Run with `-m gpu`."""

import importlib.util

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.gpu import c10d_bodies as bodies

NCCL = torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else (0,)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(NCCL == (0,), reason="this torch has no NCCL"),
]
NEWER = pytest.mark.skipif(NCCL < (2, 30), reason=f"NCCL {NCCL} takes one rank per GPU; 2.30 takes several")
NCCL4PY = pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="needs nccl4py (tricomm[nccl])")
WORLDS = [1, pytest.param(2, marks=NEWER)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_small_calls_use_the_kernels_and_large_ones_nccl(world_size, url):
    for wrong, stats in ranks.run(world_size, bodies.calls, url, timeout=200):
        assert wrong == []
        assert stats["kernels"]["all_reduce"] == 2 and stats["nccl"]["all_reduce"] == 3
        for collective in ("broadcast", "reduce", "reduce_scatter", "all_gather"):
            assert stats["kernels"][collective] == stats["nccl"][collective] == 1


@NCCL4PY
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_communicator_falls_back_to_nccl(world_size, url):
    total = world_size * (world_size + 1) // 2
    for rank, (results, rows, stats) in enumerate(ranks.run(world_size, bodies.stand_alone, url, timeout=200)):
        assert results == [(total, total)] * 3
        assert rows == [r for r in range(world_size) for _ in range(rank + 1)]
        assert stats["nccl"] == {"all_reduce": 2, "all_to_all_v": 1} and stats["kernels"] == {"all_reduce": 1}


@NEWER
def test_one_rank_in_a_kernel_and_one_in_nccl_are_named(url):
    for kind, text in ranks.run(2, bodies.another_way, url, timeout=120):
        assert kind == "CollectiveMismatch" and "make the same call" in text
