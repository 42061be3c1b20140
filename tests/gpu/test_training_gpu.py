"""Training on real GPUs: DDP, pipeline messages, graphs, and ranks that see their own GPU only. Run with `-m gpu`.

Not yet run on hardware.
"""

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.gpu import training_bodies as bodies

NCCL = torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else (0,)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WITH_NCCL = pytest.mark.skipif(NCCL < (2, 30), reason=f"NCCL {NCCL} takes one rank per GPU; 2.30 takes several")


@WITH_NCCL
@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_gives_the_gradients_of_one_rank(world_size, url):
    assert ranks.run(world_size, bodies.ddp, url, timeout=250) == [([], True)] * world_size


@WITH_NCCL
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_of_messages_in_one_batch(world_size, url):
    assert ranks.run(world_size, bodies.pipeline, url, timeout=200) == [[]] * world_size


@pytest.mark.skipif(NCCL == (0,), reason="this torch has no NCCL")
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=WITH_NCCL)])
def test_a_captured_step_is_replayed_between_eager_ones(world_size, url):
    assert ranks.run(world_size, bodies.graphs, url, timeout=200) == [[]] * world_size


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(("memory", "kind"), [("1", "cuda_vmm"), ("0", "cuda_ipc")])
def test_ranks_that_see_their_own_gpu_only_share_memory(memory, kind, url):
    """Whether a process may import memory of a GPU that it does not see, and copy to it: if not, `reason` says so."""
    for got, reason, right in ranks.run(2, bodies.own_gpu, url, memory, timeout=200):
        assert got == kind, reason
        assert right == [True, True]
