"""Dependent launches (PDL): calls keep their order, eager and in graphs, next to torch's kernels. Run with `-m gpu`.

Not yet run on hardware. `python -m devtools.gpu_evidence` times the calls with and without.
"""

import os

import pytest
import torch

import tricomm
from tests import ranks

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0 or torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90 or newer"),
]
CALLS, REPLAYS, COUNT = 8, 20, 5001


def chain(comm, x, gathered):
    """Calls with nothing between them, and with torch's kernels before and after. Each result depends on all before."""
    for number in range(CALLS):
        if number % 3 == 2:
            x.add_(number)
        comm.all_reduce(x, algorithm="one_shot" if number % 2 else "two_shot", protocol="ll")
        x.remainder_(1009)
        comm.all_gather(x, out=gathered)
        comm.barrier()


def results(rank, world_size, tell, url, dependent):
    os.environ["TRICOMM_DEPENDENT_LAUNCH"] = str(int(dependent))
    with tricomm.init(url, rank, world_size, f"cuda:{rank}", options=tricomm.Options(nccl=False)) as comm:
        said = comm.explain("all_reduce", 4 * COUNT).reason
        x = (torch.arange(COUNT, device=comm.device) % 97 + 10 * rank).float()
        gathered = torch.full((world_size * COUNT,), -1.0, device=comm.device)
        chain(comm, x, gathered)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(comm, x, gathered)
        for _ in range(REPLAYS):
            graph.replay()
            comm.all_reduce(x, algorithm="one_shot", protocol="ll")  # directly after the last kernel of the graph
            x.remainder_(1009)
        comm.synchronize()
        return said, x.cpu(), gathered.cpu()


@pytest.mark.parametrize("world_size", sorted({1, max(1, min(GPUS, 8))}))
def test_dependent_calls_have_the_results_of_calls_one_after_another(world_size, url):
    early, late = (ranks.run(world_size, results, f"{url}{on}", on, timeout=240) for on in (True, False))
    for (with_it, *got), (without, *want) in zip(early, late, strict=True):
        assert "; a dependent launch" in with_it and "TRICOMM_DEPENDENT_LAUNCH=0" in without
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_chain_of_user_kernels_waits():
    """The meaning of `griddepcontrol` on hardware: a kernel that signals at once, and one that waits for its end."""
    import triton
    import triton.language as tl
    from triton.language.extra import cuda

    @triton.jit
    def count(x, N: tl.constexpr, ROUNDS: tl.constexpr):
        lane = tl.program_id(0) * N + tl.arange(0, N)
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
        for _ in range(ROUNDS):
            tl.store(x + lane, tl.load(x + lane, volatile=True) + 1)

    x = torch.zeros(4096, dtype=torch.int64, device="cuda")
    for _ in range(200):
        count[(16,)](x, N=256, ROUNDS=50, launch_pdl=True)
    assert torch.equal(x, torch.full_like(x, 10000))
