"""Reductions of nccl4py and its faults, against a fake that enforces its rules; threads are ranks."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from tests.c10d.bodies.groups import of
from tests.core.bodies import fake_nccl
from tests.core.bodies.common_bodies import attempt
from tricomm import errors
from tricomm.core import nccl
from tricomm.core.launch_plan import Request
from tricomm.store.store_control import open_store_control

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float16]


pytestmark = pytest.mark.usefixtures("core")


def everywhere(world_size, body, timeout=30.0):
    """Run `body(comm, rank)` on every rank; return the values."""
    store = HashStore()

    def run(rank):
        control, _ = open_store_control(store, rank, world_size, timeout, 1)
        comm = nccl.open_nccl(control, CPU, timeout)
        value = body(comm, rank)
        comm.close()
        control.close()
        return value

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def call(comm, collective, x, y=None, op=None, root=-1, rows=()):
    comm.run(Request(collective, op, root=root), x, x if y is None else y, rows)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_reductions(world_size, dtype):
    def body(comm, rank):
        for number, op in enumerate(["sum", "min", "max", "prod"]):
            parts = [of(r, (2 * world_size,), dtype, number) for r in range(world_size)]
            stack = torch.stack(parts).double()
            want = {"sum": stack.sum(0), "min": stack.amin(0), "max": stack.amax(0), "prod": stack.prod(0)}[op]
            want = want.to(dtype)
            x, y, z = (parts[rank].clone() for _ in range(3))
            out, shard = torch.full_like(x, 77), torch.full((2,), 77).to(dtype)
            call(comm, "all_reduce", x, op=op)
            call(comm, "all_reduce", y, out, op)
            root = number % world_size
            call(comm, "reduce", z, op=op, root=root)
            call(comm, "reduce_scatter", y, shard, op)
            assert torch.equal(x, want) and torch.equal(out, want) and torch.equal(y, parts[rank])
            assert torch.equal(z, want if rank == root else parts[rank])
            assert torch.equal(shard, want[2 * rank : 2 * rank + 2])
        call(comm, "barrier", x)
        return True

    assert all(everywhere(world_size, body))


def test_bool_sum_means_any_and_empty_calls_do_nothing():
    def body(comm, rank):
        x = torch.tensor([rank == 0, False, True])
        call(comm, "all_reduce", x, op="sum")
        call(comm, "reduce_scatter", torch.empty(0), torch.empty(0), "sum")
        return x.tolist()

    assert everywhere(2, body) == [[True, False, True]] * 2


def test_types_and_operations_that_nccl_lacks_are_refused_by_name():
    def body(comm, rank):
        for dtype, op in [(torch.int16, "sum"), (torch.float32, "bxor"), (torch.bool, "avg"), (torch.complex64, "sum")]:
            with pytest.raises(errors.InvalidArgument, match=f"NCCL has no {op} of {dtype}"):
                call(comm, "all_reduce", torch.zeros(2, dtype=dtype), op=op)
        return True

    assert everywhere(1, body) == [True]


def test_an_asynchronous_error_aborts():
    def body(comm, rank):
        inner = comm._comm
        comm.check()
        inner.error = 7
        comm.check()
        inner.error = 6
        with pytest.raises(errors.GroupAborted, match="error 6.*a link went down.*make a new group"):
            call(comm, "all_reduce", torch.ones(1), op="sum")
        with pytest.raises(errors.GroupAborted, match="closed"):
            call(comm, "broadcast", torch.ones(1), root=0)
        comm.abort()
        return inner.ended

    assert everywhere(1, body) == ["aborted"]


def test_closed_once_and_in_order():
    kept = []
    everywhere(2, lambda comm, rank: kept.append(comm._comm))
    assert [comm.ended for comm in kept] == ["destroyed"] * 2


def failing(monkeypatch, rank_at_fault, name, fault):
    """`open_nccl` on two ranks, of which one's `nccl.<name>` does `fault`."""
    real, here = getattr(nccl, name), threading.local()
    monkeypatch.setattr(nccl, name, lambda *args: fault() if here.rank == rank_at_fault else real(*args))
    store = HashStore()

    def run(rank):
        here.rank = rank
        control, _ = open_store_control(store, rank, 2, 20.0, 1)
        kind, text, _ = attempt(lambda: nccl.open_nccl(control, CPU, 20.0))
        control.close()
        return kind, text

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def missing():
    raise errors.ResourceError("nccl4py finds no libnccl")


@pytest.mark.parametrize("rank_at_fault", [0, 1])
def test_if_one_rank_lacks_nccl_all_ranks_name_it(monkeypatch, rank_at_fault):
    for kind, text in failing(monkeypatch, rank_at_fault, "_load", missing):
        assert kind == "ResourceError"
        assert f"rank {rank_at_fault}: nccl4py finds no libnccl" in text and "tricomm[nccl]" in text


def test_a_communicator_that_fails_on_one_rank_fails_on_all(monkeypatch):
    monkeypatch.setattr(fake_nccl.Communicator, "init", classmethod(lambda cls, n, r, u: cls(fake_nccl._World(n), r)))
    for kind, text in failing(monkeypatch, 1, "_init", lambda: (None, errors.ResourceError("unhandled CUDA error"))):
        assert kind == "ResourceError" and "rank 1: unhandled CUDA error" in text


def alone(timeout=5.0):
    return open_store_control(HashStore(), 0, 1, timeout, 1)[0]


def test_a_limit_of_blocks_applies_to_nccl(monkeypatch):
    given = []
    monkeypatch.setattr(fake_nccl, "NCCLConfig", SimpleNamespace, raising=False)

    def init(cls, n, r, u, config=None):
        given.append(config)
        return cls(fake_nccl._World(n), r)

    monkeypatch.setattr(fake_nccl.Communicator, "init", classmethod(init))
    for most in (None, 16):
        nccl.open_nccl(alone(), CPU, 5.0, most).close()
    assert [config and config.max_ctas for config in given] == [None, 16]


def test_without_nccl4py_it_is_missing_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(errors.ResourceError, match="on every rank.*rank 0: nccl4py cannot be used"):
        nccl.open_nccl(alone(), CPU, 5.0)


def test_a_broken_libnccl_is_named(monkeypatch):
    monkeypatch.setattr(fake_nccl, "get_version", lambda: SimpleNamespace(libnccl=None))
    with pytest.raises(errors.ResourceError, match="rank 0: nccl4py finds no libnccl"):
        nccl.open_nccl(alone(), CPU, 5.0)


def test_closing_is_bounded_and_never_raises(caplog):
    comm = nccl.open_nccl(alone(), CPU, 5.0)
    comm._comm.destroy = lambda: time.sleep(5)
    began = time.monotonic()
    nccl.end(comm, False, 0.1)
    assert time.monotonic() - began < 3 and "left behind" in caplog.text


def test_only_contiguous_tensors_and_single_elements_are_viewed_as_bytes():
    memory = torch.arange(8, dtype=torch.int32)
    one = memory[3:].as_strided((1,), (2,), 3)
    assert torch.equal(nccl._bytes(one), memory[3:4].view(torch.uint8))
    assert torch.equal(nccl._bytes(memory[2:]), memory[2:].view(torch.uint8)) and not len(nccl._bytes(memory[:0]))
    for gaps in (memory[::2], memory.view(2, 4).t()):
        with pytest.raises(RuntimeError):
            nccl._bytes(gaps)
