"""The bodies of GPU tests over simulated ranks: every line runs, and no time means anything."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import tricomm
from tests.gpu import streams, test_first_gpu, test_times_gpu
from tests.gpu.exact import test_streams_gpu, variants
from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels.collectives import registry

OPTIONS = tricomm.Options(arena_bytes=1 << 20)


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    def resident(world_size, make_run, calls, rounds, options):
        tricomm.simulate(lambda comm: make_run(comm)(), world_size, options=OPTIONS)
        return [1.0] * rounds

    monkeypatch.setattr(streams, "resident", resident)
    monkeypatch.setattr(streams, "together", lambda n, of_rank, options: tricomm.simulate(of_rank, n, options=OPTIONS))
    monkeypatch.setattr(variants, "capability", lambda: 90)
    monkeypatch.setattr(variants, "compile_all", lambda jobs: None)


@pytest.mark.parametrize("part", ["one size", "every size"])
def test_streams(part, monkeypatch):
    monkeypatch.setattr("tests.gpu.exact.checks.COUNTS", (1, 3, 5, 7, 4096))
    test_streams_gpu.check(registry.find("gather", "one_shot", "ll"), 3, part)
    test_first_gpu.test_streams_of_one_process_run_an_all_reduce(2)


def test_times():
    told = {}

    def tell(samples, nbytes=0, factor=1.0):
        told[nbytes] = samples

    test_times_gpu.kernel_time(registry.find("all_gather", "one_shot", "ll"), 2, 1 << 10, tell)
    test_times_gpu.test_fused_rows(f"{FUSED}_one_shot_ll", 2, test_times_gpu.RowForm(160), 1, tell)
    test_times_gpu.test_fused_rows("unfused", 2, test_times_gpu.RowForm(160), 1, tell)
    test_first_gpu.test_streams_of_one_process_replay_graphs_together(2, told.__setitem__)
    assert told == {2048: [1.0] * 15, 0: [1.0] * 15, "median_us": 1.0}


def test_times_on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with tricomm.Communicator(HashStore(), 0, 1, "cpu", options=OPTIONS) as comm:
        times = test_times_gpu.enqueued(lambda: comm.all_reduce(torch.ones(4)), calls=2)
    assert len(times) == test_times_gpu.ROUNDS and min(times) > 0
