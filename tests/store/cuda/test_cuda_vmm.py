"""GPU memory shared by descriptors, against a driver that enforces CUDA's rules and passes real descriptors. No GPU."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.marks import some
from tests.store.cuda import fake_vmm
from tests.store.cuda.fake_driver import FakeCuda, FakeDriver
from tests.store.cuda.jobs import GRANULE, NBYTES, Job, fails_on_all, refused, two_gpus, works
from tests.store.store_ranks import in_threads
from tricomm import env
from tricomm.deadline import Deadline
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError
from tricomm.store.arenas import arena as arena_module
from tricomm.store.arenas.arena import open_cuda
from tricomm.store.arenas.cuda_ipc import open_cuda_ipc
from tricomm.store.arenas.cuda_vmm import VmmRecord, open_cuda_vmm, parse_record
from tricomm.store.arenas.passing import TOKEN_BYTES

PLACES = {
    "one rank": (1, [[0]]),
    "same GPU": (1, [[0], [0]]),
    "own GPUs, same order": (2, [[0, 1], [1, 0]]),
    "three GPUs, all orders": (3, [[0, 1, 2], [2, 0, 1], [1, 2, 0]]),
    "peers invisible": (2, [[0], [1]]),
}


@pytest.mark.parametrize("gpus, visible", PLACES.values(), ids=PLACES.keys())
def test_every_rank_reaches_every_block(gpus: int, visible: list[list[int]]) -> None:
    job = Job(FakeCuda(gpus), visible)
    arenas = job.open_all()
    for arena in arenas:
        assert (arena.kind, arena.nbytes, len(set(arena.bases)), arena.reason) == ("cuda_vmm", NBYTES, job.size, "")
    works(job, arenas)
    assert job.close_all(arenas) == [None] * job.size
    assert job.close_all(arenas) == [None] * job.size
    job.verify()


def test_a_block_out_of_reach_is_not_mapped() -> None:
    job = Job(FakeCuda(2, reachable=lambda a, b: a == b), [[0, 1], [1, 0]])
    arenas = in_threads(2, lambda rank: job.open(rank, reach=[rank == 0, rank == 1]))
    assert [arena.bases[1 - rank] for rank, arena in enumerate(arenas)] == [0, 0]
    with pytest.raises(InvalidArgument, match="out of rank 0's reach"):
        arenas[0].tensor(1, 0, (1,), torch.float32)
    job.close_all(arenas)
    job.verify()


def test_close_waits_for_no_peer_and_memory_outlives_its_owner() -> None:
    job = two_gpus()
    arenas = job.open_all()
    arenas[0].close()
    with arenas[1]._site.current():
        job.drivers[1].write(arenas[1].bases[0], b"still there")
        assert job.drivers[1].read(arenas[1].bases[0], 11) == b"still there"
    arenas[1].close()
    job.verify()


def test_a_peer_that_was_killed_leaves_nothing() -> None:
    job = two_gpus()
    arenas = job.open_all()
    job.drivers[1].kill()
    job.group.kill(1)
    arenas[0].close()
    job.verify()


def test_addresses_are_unmapped_then_handles_released_then_addresses_freed() -> None:
    job = two_gpus()
    arenas = job.open_all()
    for driver in job.drivers:
        driver.process.kernel_running = True
    before = len(job.drivers[0].calls)
    job.close_all(arenas)
    steps = [name for name in job.drivers[0].calls[before:] if name.startswith("cuMem")]
    assert steps == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"] * 2
    job.verify()


def test_what_is_kept_stays_mapped() -> None:
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


def calls_of_open(how: Any = open_cuda_vmm) -> list[tuple[int, str, int]]:
    """(rank, call, how many of them) of a set-up that goes well."""
    job = two_gpus(how)
    arenas = job.open_all()
    counts = [Counter(driver.calls) for driver in job.drivers]
    job.close_all(arenas)
    return [(rank, name, nth) for rank in range(2) for name, n in counts[rank].items() for nth in range(1, n + 1)]


CALLS = calls_of_open()


@pytest.mark.parametrize("rank, name, nth", some(CALLS, lambda number, call: call[2] == 1 or call[1] == "cuMemRelease"))
def test_any_failing_call_fails_all_ranks_and_leaves_nothing(rank: int, name: str, nth: int) -> None:
    fails_on_all(two_gpus(), rank, name, nth)


def test_every_kind_of_call_has_been_made_to_fail() -> None:
    names = {name for _, name, _ in CALLS}
    print(
        f"\n{len(CALLS)} calls of {len(names)} kinds were made to fail, on each rank: all ranks or none, nothing left"
    )
    assert names == {
        "cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent",
        "cuCtxPopCurrent", "cuMemHostRegister", "cuMemHostGetDevicePointer", "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
        "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemsetD8", "cuCtxSynchronize",
        "cuDeviceCanAccessPeer", "cuMemcpyHtoD", "cuMemcpyDtoH",
    }  # fmt: skip


VMM_ALONE = {"cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemSetAccess"}


@pytest.mark.parametrize("rank, name, nth", [call for call in CALLS if call[1] in VMM_ALONE and call[2] == 1])
def test_all_ranks_fall_back_to_legacy_ipc_together(rank: int, name: str, nth: int) -> None:
    job = two_gpus(open_cuda)
    job.drivers[rank].fail_at(name, nth)
    arenas = job.open_all()
    for arena in arenas:
        assert arena.kind == "cuda_ipc" and arena.reason.startswith("legacy CUDA IPC, because cuda_vmm: ")
        assert f"rank {rank}: " in arena.reason and name in arena.reason
    job.close_all(arenas)
    job.verify()


@pytest.mark.parametrize("name", sorted(VMM_ALONE))
def test_a_function_that_one_ranks_driver_does_not_have_is_named_by_all(name: str) -> None:
    job = two_gpus(open_cuda)
    job.drivers[1].process.missing = {name}
    arenas = job.open_all()
    for arena in arenas:
        assert arena.kind == "cuda_ipc" and f'{name}: Function "{name}" not found' in arena.reason
    job.close_all(arenas)
    job.verify()


def test_the_oldest_supported_driver_shares_by_descriptors_and_has_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """R525: neither multicast objects nor fabric handles, and their attributes are invalid values."""
    monkeypatch.setattr(env, "gpu_memory", lambda: "fabric")
    job = two_gpus(open_cuda)
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
    job.verify()


def test_memory_that_one_rank_asks_for_in_a_capture_is_refused_on_all_ranks() -> None:
    job = two_gpus(open_cuda)
    job.drivers[1].process.capturing = True
    outcomes = in_threads(job.size, job.open)
    refused(outcomes, ResourceError, "rank 1: ", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    job.verify()


def test_a_gpu_without_the_means_and_a_rank_that_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    job = two_gpus(open_cuda)
    job.drivers[1].process.vmm.supported = False
    arenas = job.open_all()
    assert {arena.kind for arena in arenas} == {"cuda_ipc"}
    assert "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0 for GPU 0000:01:00.0" in arenas[0].reason
    job.close_all(arenas)
    # The ranks are threads here, so the environment of one rank is what it reads.
    monkeypatch.setattr(
        env, "gpu_memory", lambda: "ipc" if threading.current_thread().name == "rank 1" else "descriptor"
    )
    arenas = job.open_all()
    assert {arena.reason for arena in arenas} == {"legacy CUDA IPC, because TRICOMM_CUDA_VMM=0 on rank(s) [1]"}
    job.close_all(arenas)
    job.verify()


def test_by_default_all_use_descriptors() -> None:
    job = two_gpus(open_cuda)
    arenas = job.open_all()
    assert [(arena.kind, arena.reason) for arena in arenas] == [("cuda_vmm", "")] * 2
    job.close_all(arenas)
    job.verify()


def test_gpus_that_cannot_reach_each_other_are_refused_with_both_reasons() -> None:
    job = Job(FakeCuda(2, reachable=lambda a, b: False), [[0], [1]], open_cuda)
    refused(in_threads(2, job.open), ResourceError, "cuIpcOpenMemHandle", "and before that", "cuMemSetAccess")
    job.verify()


def test_writes_that_do_not_arrive_are_refused_by_all() -> None:
    job = two_gpus()
    job.drivers[0].process.loses_writes_to_peers = True
    refused(in_threads(2, job.open), ResourceError, "rank 1", "rank(s) [0]", "did not arrive")
    job.verify()


KINDS = pytest.mark.parametrize("how", [open_cuda_vmm, open_cuda_ipc])


@KINDS
def test_a_full_gpu_is_named(how: Any) -> None:
    job = Job(FakeCuda(1, capacity=3 << 20), [[0], [0]], how)
    refused(in_threads(2, job.open), ResourceError, "CUDA_ERROR_OUT_OF_MEMORY", "smaller arena")
    job.verify()


@KINDS
def test_different_sizes_are_refused_by_all(how: Any) -> None:
    job = two_gpus(how)
    refused(in_threads(2, lambda rank: job.open(rank, NBYTES * (rank + 1))), RendezvousError, "8192", "4096")
    job.verify()


def test_a_descriptor_of_something_else_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = FakeDriver.export_descriptor

    def another(driver: FakeDriver, handle: int) -> int:
        os.close(usual(driver, handle))
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(FakeDriver, "export_descriptor", another)
    job = two_gpus()
    refused(in_threads(2, job.open), ResourceError, "cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_VALUE")
    job.verify()


RECORD = VmmRecord(3, bytes(range(16)), NBYTES, GRANULE, bytes(range(TOKEN_BYTES)))


def test_a_record_survives_the_way() -> None:
    assert parse_record(RECORD.pack(), 3, NBYTES) == RECORD


@pytest.mark.parametrize(
    "record, words",
    [
        (b"", "0 bytes"),
        (RECORD.pack() + b"x", "bytes"),
        (b"X" + RECORD.pack()[1:], "version"),
        (replace(RECORD, rank=4).pack(), "rank 4"),
        (replace(RECORD, nbytes=NBYTES + 1).pack(), "size"),
        (replace(RECORD, whole=NBYTES - 1).pack(), "not what CUDA gives"),
        (replace(RECORD, whole=1 << 60).pack(), "not what CUDA gives"),
    ],
)
def test_a_bad_record_is_refused(record: bytes, words: str) -> None:
    with pytest.raises(RendezvousError, match=words):
        parse_record(record, 3, NBYTES)


def test_random_records_are_refused_or_sane() -> None:
    rng, good = random.Random(1), RECORD.pack()
    for _ in range(5_000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            record = parse_record(bytes(data), 3, NBYTES)
        except RendezvousError:
            continue
        assert record.rank == 3 and record.nbytes == NBYTES and NBYTES <= record.whole <= 1 << 47
