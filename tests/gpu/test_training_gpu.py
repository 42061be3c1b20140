"""Training on real GPUs: DDP, pipeline messages, graphs, and ranks that see their own GPU only. Run with `-m gpu`.

One GPU a rank, or all ranks on the first. Not yet run on hardware.
"""

import os

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.gpu.c10d_bodies import LARGE, of, on_gpu

NCCL = torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else (0,)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WITH_NCCL = pytest.mark.skipif(NCCL < (2, 30), reason=f"NCCL {NCCL} takes one rank per GPU; 2.30 takes several")


def ddp(rank, world_size, tell, url):
    """DDP with whole numbers: parameters, gradients and losses compared with the same steps on one rank."""
    with on_gpu(rank, world_size, url):
        shape = torch.nn.Linear(16, 8, bias=False, device="cuda"), torch.nn.Linear(8, 4, bias=False, device="cuda")
        alone, model = (
            torch.nn.Sequential(*shape),
            torch.nn.Sequential(*(torch.nn.Linear(*s, False, "cuda") for s in ((16, 8), (8, 4)))),
        )
        with torch.no_grad():
            for n, parameter in enumerate(alone.parameters()):
                parameter.copy_(((torch.arange(parameter.numel(), device="cuda") + n) % 3 - 1).view_as(parameter))
            for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
                mine.copy_(right if rank == 0 else torch.full_like(right, 77))  # rank 0's are given to all
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
        wrong = []
        for step in range(4):
            batches = [
                ((torch.arange(64, device="cuda") + r + step) % 5 - 2).float().view(4, 16) for r in range(world_size)
            ]
            for each in (alone, model):
                each.zero_grad(set_to_none=True)
            sum(alone(batch).sum() for batch in batches).backward()
            model(batches[rank]).sum().backward()
            for name, parameter in alone.named_parameters():
                mean = parameter.grad / world_size
                if not torch.equal(model.module.get_parameter(name).grad, mean):
                    wrong.append((step, name))
        torch.cuda.synchronize()
        return wrong, tricomm.stats()["kernels"]["all_reduce"] > 0


def pipeline(rank, world_size, tell, url):
    """A ring of messages in one batch, small and beyond NCCL's buffers, as pipeline and ring parallelism send them."""
    wrong = []
    with on_gpu(rank, world_size, url):
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        for count in (5, LARGE):
            for turn in range(3):
                y = torch.full((count,), 77.0, device="cuda")
                ops = [dist.P2POp(dist.isend, of(rank + turn, count), after), dist.P2POp(dist.irecv, y, before)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                if not torch.equal(y, of(before + turn, count)):
                    wrong.append((count, turn))
        x = of(rank, 8)
        dist.all_reduce(x)
        if not torch.equal(x, sum(of(r, 8) for r in range(world_size))):
            wrong.append("all_reduce")
    return wrong


def graphs(rank, world_size, tell, url):
    """A captured step of all_gather, reduce_scatter and all_reduce, replayed between eager calls of the same."""
    wrong = []
    with on_gpu(rank, world_size, url):
        x, back = torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda")
        rows = torch.zeros(256 * world_size, device="cuda")

        def step():
            dist.all_gather_into_tensor(rows, x)
            dist.reduce_scatter_tensor(back, rows)
            dist.all_reduce(back)

        step()
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for turn in range(20):
            x.copy_(of(rank + turn, 256))
            torch.cuda.synchronize()
            (graph.replay if turn % 2 else step)()
            torch.cuda.synchronize()
            right = world_size * sum(of(r + turn, 256) for r in range(world_size))
            if not torch.equal(back, right):
                wrong.append(turn)
    return wrong


def own_gpu(rank, world_size, tell, url, memory):
    """Each rank sees its own GPU only; the kind of memory that they share, why, and what an all_reduce gives."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(world_size)))
    os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TRICOMM_CUDA_VMM"] = seen.split(",")[rank], memory
    options = tricomm.Options(timeout=60.0, nccl=False)
    with tricomm.init(url, rank, world_size, "cuda:0", options=options) as comm:
        right = sum(of(r, 5000) for r in range(world_size))
        sums = [comm.all_reduce(of(rank, 5000), protocol=protocol) for protocol in ("ll", "simple")]
        comm.synchronize()
        return comm.kind, comm.explain("all_reduce", 1024).reason, [torch.equal(x, right) for x in sums]


@WITH_NCCL
@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_gives_the_gradients_of_one_rank(world_size, url):
    assert ranks.run(world_size, ddp, url, timeout=250) == [([], True)] * world_size


@WITH_NCCL
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_of_messages_in_one_batch(world_size, url):
    assert ranks.run(world_size, pipeline, url, timeout=200) == [[]] * world_size


@pytest.mark.skipif(NCCL == (0,), reason="this torch has no NCCL")
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=WITH_NCCL)])
def test_a_captured_step_is_replayed_between_eager_ones(world_size, url):
    assert ranks.run(world_size, graphs, url, timeout=200) == [[]] * world_size


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(("memory", "kind"), [("1", "cuda_vmm"), ("0", "cuda_ipc")])
def test_ranks_that_see_their_own_gpu_only_share_memory(memory, kind, url):
    """Whether a process may import memory of a GPU that it does not see, and copy to it: if not, `reason` says so."""
    for got, reason, right in ranks.run(2, own_gpu, url, memory, timeout=200):
        assert got == kind, reason
        assert right == [True, True]
