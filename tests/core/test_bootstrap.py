"""GPUs of a fake driver: ranks whose GPUs cannot reach each other make a group over NCCL only."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tests.store.cuda.fake_driver import FakeCuda
from tricomm import errors
from tricomm.core import bootstrap
from tricomm.kernels import layout
from tricomm.metrics.counters import NCCL
from tricomm.policy import backend_choice
from tricomm.store.arenas.open_arena import open_cuda

NBYTES = 2 << 20


def everywhere(monkeypatch, world, world_size=2, nccl=True):
    """Run `join` on each rank, a thread with a fake process, and close it; return each one's result or error."""
    drivers = [world.process() for _ in range(world_size)]

    def open_arena(control, nbytes, device, timeout, reach=None, *_):
        return open_cuda(control, nbytes, torch.device("cuda", control.rank), timeout, drivers[control.rank], reach)

    monkeypatch.setattr(bootstrap, "open_arena", open_arena)
    monkeypatch.setattr(bootstrap, "fallback", lambda device, options: (NCCL, "") if nccl else (None, "no NCCL"))
    store, options = HashStore(), tricomm.Options(arena_bytes=NBYTES)
    plan = layout.plan(min(world_size, layout.MAX_WORLD_SIZE), NBYTES)

    def run(rank):
        try:
            with ExitStack() as undo:
                terms = bootstrap.Terms(rank, world_size, torch.device("cpu"), 20.0, 20.0, options, plan)
                result = bootstrap.join(undo, store, terms)
                undo.pop_all()
        except errors.TricommError as error:
            return error
        result.arena.close()
        result.control.close()
        return result

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def test_gpus_that_reach_each_other_share_memory(monkeypatch, core):
    world = FakeCuda(2)
    for result in everywhere(monkeypatch, world):
        assert result.arena.kind == "cuda_vmm" and result.routes.no_kernels is None and result.routes.fallback == "nccl"
    world.verify()


def test_gpus_that_do_not_go_to_nccl(monkeypatch, core, caplog):
    world = FakeCuda(2, reachable=lambda a, b: a == b)
    for result in everywhere(monkeypatch, world):
        assert result.arena.kind == "none" and not any(result.arena.bases)
        assert "cannot share memory" in result.routes.no_kernels and "cannot reach GPU" in result.routes.no_kernels
        route = backend_choice.decide(result.routes, "all_reduce", torch.float32, "sum", 8)
        assert route.backend == "nccl" and route.reason == result.routes.no_kernels
    assert caplog.text.count("every call goes to NCCL") == 1  # rank 0 alone says it
    world.verify()


@pytest.mark.parametrize("nccl", [True, False], ids=["missing", "not wanted"])
def test_without_nccl_all_ranks_name_both_reasons(monkeypatch, nccl):
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    world = FakeCuda(2, reachable=lambda a, b: a == b)
    for error in everywhere(monkeypatch, world, nccl=nccl):
        assert isinstance(error, errors.ResourceError) and "cannot reach GPU" in str(error)
        assert ("nccl4py cannot be used" in str(error)) == nccl
    world.verify()


def test_more_ranks_than_the_kernels_take(monkeypatch, core):
    for result in everywhere(monkeypatch, FakeCuda(1), world_size=layout.MAX_WORLD_SIZE + 1):
        assert result.routes.no_kernels == "the kernels take up to 16 ranks, here are 17"
