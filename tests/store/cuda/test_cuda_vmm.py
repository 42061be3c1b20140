"""GPU memory shared by descriptors, against a driver that enforces CUDA's rules and passes real descriptors. No GPU."""

from __future__ import annotations

import os
import threading
from collections import Counter

import pytest
import torch

from tests.store.cuda import fake_vmm
from tests.store.cuda.fake_driver import FakeCuda, FakeDriver
from tests.store.cuda.jobs import Job, refused, two_gpus
from tests.store.store_ranks import in_threads
from tricomm import env
from tricomm.deadline import Deadline
from tricomm.errors import GroupAborted, InvalidArgument, ResourceError
from tricomm.store.arenas import open_arena as arena_module
from tricomm.store.arenas.open_arena import open_cuda


def test_a_block_out_of_reach_is_not_mapped(verified):
    job = verified(Job(FakeCuda(2, reachable=lambda a, b: a == b), [[0, 1], [1, 0]]))
    arenas = job.open_all(lambda rank: job.open(rank, reach=[rank == 0, rank == 1]))
    assert [arena.bases[1 - rank] for rank, arena in enumerate(arenas)] == [0, 0]
    with pytest.raises(InvalidArgument, match="out of rank 0's reach"):
        arenas[0].tensor(1, 0, (1,), torch.float32)


def test_close_waits_for_no_peer_and_memory_outlives_its_owner(job, arenas):
    arenas[0].close()
    with arenas[1]._site.current():
        job.drivers[1].write(arenas[1].bases[0], b"still there")
        assert job.drivers[1].read(arenas[1].bases[0], 11) == b"still there"
    arenas[1].close()


def test_a_peer_that_was_killed_leaves_nothing(job, arenas):
    job.kill(1)
    arenas[0].close()


def test_addresses_are_unmapped_then_handles_released_then_addresses_freed(job, arenas):
    for driver in job.drivers:
        driver.process.kernel_running = True
    before = len(job.drivers[0].calls)
    job.close_all(arenas)
    steps = [name for name in job.drivers[0].calls[before:] if name.startswith("cuMem")]
    assert steps == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"] * 2


def test_memory_that_is_kept_stays_mapped():
    job = two_gpus()
    arenas = job.open_all()
    before = Counter(job.drivers[1].calls)
    arenas[1].keep()
    arenas[1].close()
    arenas[0].close()
    assert Counter(job.drivers[1].calls) == before and job.world.complaints == []
    with pytest.raises(GroupAborted):
        arenas[1].tensor(0, 0, (1,), torch.float32)
    with arenas[1]._site.current():
        job.drivers[1].write(arenas[1].bases[0], b"kept")


VMM_ALONE = {"cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemSetAccess"}
ALONE = [(rank, name, 1) for rank in range(2) for name in sorted(VMM_ALONE)]


@pytest.mark.parametrize("rank, name, nth", ALONE)
def test_all_ranks_fall_back_to_legacy_ipc_together(verified, rank, name, nth):
    job = verified(two_gpus(open_cuda))
    job.drivers[rank].fail_at(name, nth)
    arenas = job.open_all()
    for arena in arenas:
        assert arena.kind == "cuda_ipc" and arena.reason.startswith("legacy CUDA IPC, because cuda_vmm: ")
        assert f"rank {rank}: " in arena.reason and name in arena.reason


@pytest.mark.parametrize("name", sorted(VMM_ALONE))
def test_a_function_that_one_ranks_driver_does_not_have_is_named_by_all(verified, name):
    job = verified(two_gpus(open_cuda))
    job.drivers[1].process.missing = {name}
    arenas = job.open_all()
    for arena in arenas:
        assert arena.kind == "cuda_ipc" and f'{name}: Function "{name}" not found' in arena.reason


def test_the_oldest_supported_driver_shares_by_descriptors_and_has_no_switch(verified, monkeypatch):
    """R525 has neither multicast objects nor fabric handles, and refuses their attributes as invalid."""
    monkeypatch.setattr(env, "gpu_memory", lambda: "fabric")
    job = verified(two_gpus(open_cuda))
    for driver in job.drivers:
        calls = {name for name in dir(driver.process) if name.startswith("cuMulticast")}
        driver.process.missing = {*calls, fake_vmm.BY_FABRIC, fake_vmm.MULTICAST}
    arenas = job.open_all()
    for arena in arenas:
        assert arena.kind == "cuda_vmm" and arena.reason.startswith("descriptors, because cuda_vmm: ")
        assert "HANDLE_TYPE_FABRIC_SUPPORTED: cuDeviceGetAttribute: CUDA_ERROR_INVALID_VALUE" in arena.reason
    in_threads(job.size, lambda rank: arenas[rank].look_for_switch(Deadline(10.0)))
    assert all("CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: cuDevice" in arena.no_multicast for arena in arenas)
    job.close_all(arenas)
    monkeypatch.setattr(arena_module, "load_driver", lambda: job.drivers[0])
    kind, reason = arena_module.expected_kind(2)
    assert kind == "cuda_vmm" and reason.startswith("descriptors, because CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC")
    assert "MULTICAST_SUPPORTED" in arena_module.no_multicast_expected(2)


def test_memory_that_one_rank_asks_for_in_a_capture_is_refused_on_all_ranks(verified):
    job = verified(two_gpus(open_cuda))
    job.drivers[1].process.capturing = True
    outcomes = in_threads(job.size, job.open)
    refused(outcomes, ResourceError, "rank 1: ", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")


def test_a_gpu_without_support_and_a_rank_that_forbids_it(verified, monkeypatch):
    job = verified(two_gpus(open_cuda))
    job.drivers[1].process.vmm.supported = False
    arenas = job.open_all()
    assert {arena.kind for arena in arenas} == {"cuda_ipc"}
    assert "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0 for GPU 0000:01:00.0" in arenas[0].reason
    job.close_all(arenas)
    # The ranks are threads with one environment, so the function that reads it is patched for each rank.
    monkeypatch.setattr(
        env, "gpu_memory", lambda: "ipc" if threading.current_thread().name == "rank 1" else "descriptor"
    )
    arenas = job.open_all()
    assert {arena.reason for arena in arenas} == {"legacy CUDA IPC, because TRICOMM_CUDA_VMM=0 on rank(s) [1]"}


def test_by_default_all_use_descriptors(verified):
    job = verified(two_gpus(open_cuda))
    arenas = job.open_all()
    assert [(arena.kind, arena.reason) for arena in arenas] == [("cuda_vmm", "")] * 2


def test_gpus_that_cannot_reach_each_other_are_refused_with_both_reasons(verified):
    job = verified(Job(FakeCuda(2, reachable=lambda a, b: False), [[0], [1]], open_cuda))
    refused(in_threads(2, job.open), ResourceError, "cuIpcOpenMemHandle", "and before that", "cuMemSetAccess")


def test_a_descriptor_of_something_else_is_refused_by_all(verified, monkeypatch):
    usual = FakeDriver.export_descriptor

    def another(driver: FakeDriver, handle: int) -> int:
        os.close(usual(driver, handle))
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(FakeDriver, "export_descriptor", another)
    job = verified(two_gpus())
    refused(in_threads(2, job.open), ResourceError, "cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_VALUE")
