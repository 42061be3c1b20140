"""The libraries that a benchmark compares with: their calls, and the reasons why one is left out."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import tricomm
from tests import ranks
from tricomm.kernels.collective_specs import COLLECTIVES, Collective
from tricomm.perf.bench import baselines, check_data
from tricomm.perf.bench.baselines import Baselines, ComparedCall
from tricomm.perf.bench.collective_calls import Unavailable


@pytest.fixture
def context(url, tmp_path, monkeypatch):
    """The groups of one rank on the CPU."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with tricomm.init(url, 0, 1, "cpu") as comm:
        libraries = Baselines(comm, FileStore(str(tmp_path / "others"), 1))
        yield libraries._joined()
        libraries.close()


@pytest.mark.parametrize(
    "there, version, one_gpu, words",
    [
        (False, (2, 31, 0), False, "this torch has no NCCL"),
        (True, (2, 29, 7), True, "NCCL is 2.29.7; several ranks on one device need 2.30 or newer"),
        (True, (2, 29, 7), False, None),
        (True, (2, 30, 3, "rc"), True, None),
        (True, (3, 0, 0), True, None),
    ],
)
def test_which_nccl_can_take_part(monkeypatch, there, version, one_gpu, words):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: there)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert baselines.no_nccl(one_gpu) == words


def test_multicast_of_the_libraries_is_off_only_for_ranks_that_share_a_gpu(context, tmp_path, monkeypatch):
    for name in baselines._ONE_GPU:
        assert name not in os.environ
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "init_process_group", lambda *how, **more: None)
    for gpus, shared in ((2, False), (1, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        comm = SimpleNamespace(simulated=False, rank=0, world_size=2)
        assert Baselines(comm, FileStore(str(tmp_path / f"{gpus}"), 1))._joined().one_gpu == shared
        assert {name: os.environ.get(name) for name in baselines._ONE_GPU} == (
            baselines._ONE_GPU if shared else dict.fromkeys(baselines._ONE_GPU)
        )


def test_a_missing_kraken_names_the_places_searched(context):
    with pytest.raises(Unavailable, match="PYTHONPATH has no checkout of github.com/meta-pytorch/kraken"):
        baselines.kraken(ComparedCall(context, "all_reduce", torch.bfloat16, 8), "one_shot")


def test_symmetric_memory_is_called_as_torch_names_it(context, monkeypatch):
    calls, handle = [], SimpleNamespace(multicast_ptr=0)
    memory = SimpleNamespace(empty=torch.empty, rendezvous=lambda x, group: handle)
    names = ("one_shot_all_reduce_out", "two_shot_all_reduce_", "multimem_all_reduce_")
    assert all(hasattr(torch.ops.symm_mem, name) for name in names)

    def op(name):
        return lambda x, op, group, out=None: calls.append((name, op, group)) or (x if out is None else out.copy_(x))

    monkeypatch.setattr(baselines, "symmetric_memory", memory)
    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace(**{name: op(name) for name in names}))
    call = ComparedCall(context, "all_reduce", torch.bfloat16, 8)
    with pytest.raises(Unavailable, match="multimem needs a multicast address, which this box lacks"):
        baselines.symm_mem(call, "multimem")
    handle.multicast_ptr = 4096
    for make in baselines.of_library("symm_mem", "all_reduce").values():
        made = make(call)
        made.load(torch.arange(8))
        assert torch.equal(made.run(), torch.arange(8).bfloat16())
    assert set(calls) == {(name, "sum", dist.group.WORLD.group_name) for name in names}


def test_a_collective_that_torch_has_not_is_left_out_of_the_comparison_only(context, monkeypatch):
    monkeypatch.setitem(COLLECTIVES, "all_to_some", Collective("all_to_some"))
    with pytest.raises(Unavailable, match="does not know how torch.distributed calls all_to_some"):
        baselines.gloo(ComparedCall(context, "all_to_some", torch.float32, 8))


def gloo_and_ours(rank, world_size, tell, url):
    """By collective and root: the wrong elements of Gloo's result and of tricomm's."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    wrong = {}
    with tricomm.init(url, rank, world_size, "cpu") as comm:
        libraries = Baselines(comm, FileStore(f"{url.removeprefix('file://')}-others", world_size))
        for collective in COLLECTIVES:
            for root in range(world_size):
                count = 0 if collective == "barrier" else 5
                call = ComparedCall(libraries._joined(), collective, torch.float32, count, root)
                data = check_data.values(collective, "sum", world_size, rank, root, count, torch.float32)
                exact = check_data.expected(collective, "sum", world_size, root, count, rank, torch.float32)
                for make in (baselines.gloo, lambda call: baselines.ours(call, None)):
                    made = make(call)
                    made.load(data)
                    result = made.run()
                    bad = check_data.wrong(result, exact) if result is not None else 0
                    wrong[collective, root] = wrong.get((collective, root), 0) + bad
                    assert (result is not None) == (call.gets and collective != "barrier"), (collective, root)
        libraries.close()
    return wrong


def test_every_collective_has_the_same_result_in_torch(url):
    wrong = {(name, root): 0 for name in COLLECTIVES for root in range(2)}
    assert ranks.run(2, gloo_and_ours, url) == [wrong, wrong]
