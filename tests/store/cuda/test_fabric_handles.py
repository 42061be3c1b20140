"""GPU memory and multicast objects shared by fabric handles, against a driver that enforces CUDA's rules. No GPU."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from tests.marks import some
from tests.store.cuda.fake_driver import FakeCuda, FakeDriver
from tests.store.cuda.jobs import Job, refused, two_gpus, works
from tests.store.store_ranks import in_threads
from tricomm import env
from tricomm.deadline import Deadline
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.store import descriptors
from tricomm.store.arenas.cuda_vmm import open_cuda_vmm
from tricomm.store.arenas.open_arena import open_cuda
from tricomm.store.cuda.cuda_driver import FABRIC

by_fabric = partial(open_cuda_vmm, sharing=FABRIC)


def three_gpus(how: Any = by_fabric) -> Job:
    return Job(FakeCuda(3), [[0, 1, 2], [2, 0, 1], [1, 2, 0]], how)


@pytest.fixture
def job(verified):
    return verified(three_gpus())


def by_rank(monkeypatch: pytest.MonkeyPatch, *wishes: str) -> None:
    """Give each rank its value of the variable: the ranks are threads with one environment."""
    monkeypatch.setattr(env, "gpu_memory", lambda: wishes[int(threading.current_thread().name.split()[1])])


def test_blocks_and_the_switch_without_any_socket(verified, monkeypatch):
    monkeypatch.setattr(descriptors.DescriptorSocket, "bind", lambda socket: pytest.fail("a socket was made"))
    job = verified(three_gpus())
    arenas = job.open_all()
    works(job, arenas)
    in_threads(3, lambda rank: arenas[rank].look_for_switch(Deadline(10.0)))
    assert all(arena.multicast and not arena.no_multicast for arena in arenas)
    assert not job.world.exported, "a descriptor was made"


def test_memory_is_mapped_again_at_the_same_addresses(job, arenas):
    in_threads(3, lambda rank: arenas[rank].look_for_switch(Deadline(10.0)))
    before = [(arena.bases, arena.multicast) for arena in arenas]
    tokens = set(job.world.by_fabric)
    in_threads(3, lambda rank: arenas[rank].suspend())
    assert not any(memory.users for memory in job.world.physical)
    in_threads(3, lambda rank: arenas[rank].resume(job.group.controls[rank], 10.0))
    assert [(arena.bases, arena.multicast) for arena in arenas] == before
    assert len(set(job.world.by_fabric) - tokens) == len(tokens) == 4, "three blocks and the multicast object"
    works(job, arenas)


@pytest.mark.parametrize("token", some([bytes(64), b"\xff" * 64, b"of another job".ljust(64)], lambda n, _: n == 0))
def test_a_handle_of_something_else_is_refused_by_all(verified, monkeypatch, token):
    monkeypatch.setattr(FakeDriver, "export_fabric", lambda driver, handle: token)
    job = verified(two_gpus(by_fabric))
    refused(in_threads(2, job.open), ResourceError, "cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_VALUE")


def test_a_handle_keeps_no_memory_alive(monkeypatch):
    """So no rank may free its block before all have imported it: all ranks map in one stage."""
    job = two_gpus(by_fabric)
    driver = job.drivers[0]
    usual = driver.export_fabric

    def lose(handle: int) -> bytes:
        token = usual(handle)
        job.world.by_fabric[token].users = 0
        return token

    monkeypatch.setattr(driver, "export_fabric", lose)
    refused(in_threads(2, job.open), ResourceError, "rank 1", "rank 0's memory cannot be mapped")


def test_fabric_handles_are_used_if_all_ranks_request_them(verified, monkeypatch):
    by_rank(monkeypatch, "fabric", "fabric")
    job = verified(two_gpus(open_cuda))
    arenas = job.open_all()
    assert {(arena.kind, arena.reason) for arena in arenas} == {
        ("cuda_vmm", "fabric handles, because TRICOMM_CUDA_VMM=fabric")
    }


def test_ranks_agree_if_some_do_not_request_or_support_fabric_handles(verified, monkeypatch):
    job = verified(two_gpus(open_cuda))

    def opened(kind: str, *words: str) -> None:
        arenas = job.open_all()
        assert len({arena.reason for arena in arenas}) == 1 and {arena.kind for arena in arenas} == {kind}
        assert all(word in arenas[0].reason for word in words), arenas[0].reason
        job.close_all(arenas)

    by_rank(monkeypatch, "fabric", "descriptor")
    opened("cuda_vmm", "descriptors, because no TRICOMM_CUDA_VMM=fabric on rank(s) [1]")
    by_rank(monkeypatch, "fabric", "ipc")
    opened("cuda_ipc", "legacy CUDA IPC, because TRICOMM_CUDA_VMM=0 on rank(s) [1]")
    by_rank(monkeypatch, "fabric", "fabric")
    job.drivers[1].process.vmm.imex_channel = False
    opened("cuda_vmm", "descriptors, because cuda_vmm: ", "rank 1: cuMemCreate: CUDA_ERROR_NOT_PERMITTED", "IMEX")
    job.drivers[1].process.vmm.supported = False
    opened("cuda_ipc", "legacy CUDA IPC, because cuda_vmm: ", "; and before that cuda_vmm: ")


def test_an_invalid_kind_of_memory_is_named_on_all_ranks(verified, monkeypatch):
    usual = env.gpu_memory
    monkeypatch.setenv("TRICOMM_CUDA_VMM", "fabrik")
    names = {"rank 0": lambda: "descriptor", "rank 1": usual}
    monkeypatch.setattr(env, "gpu_memory", lambda: names[threading.current_thread().name]())
    job = verified(two_gpus(open_cuda))
    refused(in_threads(2, job.open), InvalidArgument, "TRICOMM_CUDA_VMM", "'fabrik'", "fabric")


@pytest.mark.parametrize(
    "value, kind", [(None, "descriptor"), ("1", "descriptor"), ("0", "ipc"), (" Fabric ", "fabric")]
)
def test_the_variable(monkeypatch, value, kind):
    monkeypatch.delenv("TRICOMM_CUDA_VMM", raising=False)
    if value is not None:
        monkeypatch.setenv("TRICOMM_CUDA_VMM", value)
    assert env.gpu_memory() == kind
