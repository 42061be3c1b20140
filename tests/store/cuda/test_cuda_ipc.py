"""Sharing GPU memory against a driver that enforces CUDA's rules. No GPU."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.store.cuda.fake_driver import FakeCuda
from tests.store.cuda.jobs import NBYTES, Job, fails_on_all, refused, works
from tests.store.store_ranks import in_threads
from tricomm import env
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError
from tricomm.store.arenas import cuda_ipc
from tricomm.store.arenas.cuda_ipc import BlockRecord, open_cuda_ipc, parse_record


def ipc_job(world: FakeCuda, visible: list[list[int]]) -> Job:
    return Job(world, visible, open_cuda_ipc)


def two_gpus() -> Job:
    return ipc_job(FakeCuda(2), [[0, 1], [1, 0]])


PLACES = {
    "same GPU": (1, [[0], [0]]),
    "own GPUs, same order": (2, [[0, 1], [1, 0]]),
    "three GPUs, all orders": (3, [[0, 1, 2], [2, 0, 1], [1, 2, 0]]),
    "peers invisible": (2, [[0], [1]]),
    "two ranks on each GPU": (2, [[0, 1], [0, 1], [1, 0], [1]]),
}


@pytest.mark.parametrize("gpus, visible", PLACES.values(), ids=PLACES.keys())
def test_every_rank_reaches_every_block(gpus: int, visible: list[list[int]]) -> None:
    job = ipc_job(FakeCuda(gpus), visible)
    arenas = job.open_all()
    for arena in arenas:
        assert (arena.kind, arena.nbytes, len(set(arena.bases))) == ("cuda_ipc", NBYTES, job.size)
    works(job, arenas)
    assert job.close_all(arenas) == [None] * job.size
    assert job.close_all(arenas) == [None] * job.size
    job.verify()


def test_blocks_are_freed_only_after_all_have_unmapped_them() -> None:
    job = ipc_job(FakeCuda(2), [[0, 1], [1, 0], [0]])
    arenas = job.open_all()
    for driver in job.drivers:
        driver.process.kernel_running = True
    job.world.log.clear()
    job.close_all(arenas)
    names = [name for _, name in job.world.log]
    assert names.index("cuMemFree") > max(i for i, name in enumerate(names) if name == "cuIpcCloseMemHandle")
    job.verify()


def test_control_words_are_mapped_once_for_all_arenas_of_a_process() -> None:
    job = two_gpus()
    first, second = job.open_all(), job.open_all()
    for rank in range(2):
        assert first[rank].control_address == second[rank].control_address
        assert job.drivers[rank].calls.count("cuMemHostRegister") == 1
    job.close_all(first)
    job.close_all(second)
    assert all(driver.process.pinned.all for driver in job.drivers)  # the page is its owner's, not an arena's
    job.verify()


def calls_of_open() -> list[tuple[int, str, int]]:
    """(rank, call, how many of them) of a set-up that goes well."""
    job = two_gpus()
    arenas = job.open_all()
    counts = [Counter(driver.calls) for driver in job.drivers]
    job.close_all(arenas)
    return [(rank, name, nth) for rank in range(2) for name, n in counts[rank].items() for nth in range(1, n + 1)]


@pytest.mark.parametrize("rank, name, nth", calls_of_open())
def test_any_failing_call_fails_all_ranks_and_leaves_nothing(rank: int, name: str, nth: int) -> None:
    fails_on_all(two_gpus(), rank, name, nth)


def test_every_kind_of_call_has_been_made_to_fail() -> None:
    assert {name for _, name, _ in calls_of_open()} == {
        "cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent",
        "cuCtxPopCurrent", "cuMemHostRegister", "cuMemHostGetDevicePointer", "cuMemAlloc", "cuMemsetD8",
        "cuCtxSynchronize", "cuMemGetAddressRange", "cuIpcGetMemHandle", "cuDeviceCanAccessPeer", "cuIpcOpenMemHandle",
        "cuMemcpyHtoD", "cuMemcpyDtoH",
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_writes_that_do_not_arrive_are_refused_by_all(rank: int) -> None:
    job = two_gpus()
    job.drivers[rank].process.loses_writes_to_peers = True
    refused(in_threads(2, job.open), ResourceError, f"rank {1 - rank}", f"rank(s) [{rank}]", "did not arrive")
    job.verify()


def test_gpus_that_cannot_reach_each_other_are_refused_by_all() -> None:
    job = ipc_job(FakeCuda(2, reachable=lambda a, b: (a, b) != (1, 0)), [[0, 1], [1, 0]])
    refused(in_threads(2, job.open), ResourceError, "rank 1", "0000:01:00.0", "0000:00:00.0", "cuDeviceCanAccessPeer")
    job.verify()


def test_for_an_invisible_gpu_opening_decides() -> None:
    job = ipc_job(FakeCuda(2, reachable=lambda a, b: False), [[0], [1]])
    refused(in_threads(2, job.open), ResourceError, "cuIpcOpenMemHandle", "PEER_ACCESS_UNSUPPORTED", "--ipc=host")
    job.verify()


@pytest.mark.parametrize("variable", ["TRICOMM_P2P_DISABLE", "NCCL_P2P_DISABLE"])
def test_one_rank_that_forbids_peer_access_decides_for_all(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The ranks are threads here, so the environment of one rank is what it reads.
    text = env.text

    def of_rank_1(name: str) -> str | None:
        return "1" if name == variable and threading.current_thread().name == "rank 1" else text(name)

    monkeypatch.setattr(env, "text", of_rank_1)
    job = two_gpus()
    refused(in_threads(2, job.open), ResourceError, "rank 1", variable)
    assert job.drivers[1].calls == []
    job.verify()


@pytest.mark.parametrize("nbytes, device", [(15, "cuda:0"), (-1, "cuda:0"), (1 << 60, "cuda:0"), (NBYTES, "cpu")])
def test_bad_arguments_are_refused_by_all(nbytes: int, device: str) -> None:
    job = two_gpus()
    outcomes = in_threads(2, lambda rank: job.open(rank, nbytes, device) if rank else job.open(rank))
    refused(outcomes, InvalidArgument, "rank 1")
    job.verify()


def test_a_gpu_that_is_not_there_is_named() -> None:
    job = two_gpus()
    refused(in_threads(2, lambda rank: job.open(rank, NBYTES, "cuda:7")), ResourceError, "CUDA_VISIBLE_DEVICES")
    job.verify()


def test_a_forged_handle_is_refused_by_all() -> None:
    job = two_gpus()
    job.group.controls[0].tamper = lambda what, data: data[:-64] + bytes(64) if "memory records" in what else data
    refused(in_threads(2, job.open), ResourceError, "cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_HANDLE")
    job.verify()


def test_a_block_is_sought_where_its_record_says() -> None:
    def shifted(what: str, data: bytes) -> bytes:
        return parse_record(data, 0, NBYTES)._replace(offset=256).pack() if "memory records" in what else data

    job = two_gpus()
    job.group.controls[0].tamper = shifted
    refused(in_threads(2, job.open), ResourceError, "rank 0", "rank(s) [1]", "did not arrive")
    job.verify()


RECORD = BlockRecord(3, bytes(range(16)), NBYTES, 256, bytes(range(64)))


def test_a_record_survives_the_way() -> None:
    assert parse_record(RECORD.pack(), 3, NBYTES) == RECORD
    assert len(RECORD.pack()) <= 1024
    assert "\\x" not in repr(RECORD) and "handle" not in repr(RECORD)


@pytest.mark.parametrize(
    "record, words",
    [
        (b"", "0 bytes"),
        (RECORD.pack() + b"x", "bytes"),
        (b"X" + RECORD.pack()[1:], "version"),
        (RECORD.pack()[:4] + b"\x02\x00" + RECORD.pack()[6:], "version"),
        (BlockRecord(4, RECORD.uuid, NBYTES, 0, RECORD.handle).pack(), "rank 4"),
        (BlockRecord(3, RECORD.uuid, NBYTES + 1, 0, RECORD.handle).pack(), "size"),
        (BlockRecord(3, RECORD.uuid, NBYTES, 2 << 20, RECORD.handle).pack(), "allocation"),
        (BlockRecord(3, RECORD.uuid, NBYTES, 255, RECORD.handle).pack(), "allocation"),
    ],
)
def test_a_bad_record_is_refused(record: bytes, words: str) -> None:
    with pytest.raises(RendezvousError, match=words):
        parse_record(record, 3, NBYTES)


def test_random_records_are_refused_or_sane() -> None:
    rng = random.Random(1)
    good = RECORD.pack()
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            record = parse_record(bytes(data[: rng.choice([len(good), len(good), rng.randrange(200)])]), 3, NBYTES)
        except RendezvousError:
            continue
        assert record.rank == 3 and record.nbytes == NBYTES and record.offset < 2 << 20


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_ipc, "CLOSE_SECONDS", 0.3)
    yield


def test_a_dead_peer_does_not_hold_up_close(caplog: pytest.LogCaptureFixture) -> None:
    job = two_gpus()
    arenas = job.open_all()
    job.drivers[1].kill()
    job.group.kill(1)
    arenas[0].close()
    assert caplog.records == []
    job.verify()


def test_a_silent_peer_holds_up_close_for_its_bound_only(impatient: None, caplog: pytest.LogCaptureFixture) -> None:
    job = two_gpus()
    arenas = job.open_all()
    job.drivers[1].process.die()  # so that the fake lets the block go: the peer is silent, yet counted alive
    arenas[0].close()
    assert "rank(s) [1] did not confirm within 0.3 s" in caplog.text
    job.verify()


def test_memory_that_a_peer_cannot_unmap_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    job = two_gpus()
    arenas = job.open_all()
    job.drivers[1].fail_at("cuIpcCloseMemHandle")
    outcomes = job.close_all(arenas)
    assert outcomes[0] is None and isinstance(outcomes[1], ResourceError)
    assert "rank 0 keeps 4096 bytes" in caplog.text
    assert job.world.complaints == []
    assert job.drivers[0].calls.count("cuMemFree") == job.drivers[0].calls.count("cuDevicePrimaryCtxRelease") == 0


def test_what_one_rank_keeps_is_kept_by_all(caplog: pytest.LogCaptureFixture) -> None:
    job = two_gpus()
    arenas = job.open_all()
    arenas[1].close = arenas[1].keep  # type: ignore[method-assign]
    before = Counter(job.drivers[1].calls)
    assert job.close_all(arenas) == [None, None]
    assert "rank 0 keeps 4096 bytes" in caplog.text and job.world.complaints == []
    assert job.drivers[0].calls.count("cuMemFree") == 0
    assert Counter(job.drivers[1].calls) == before, "who keeps memory asks the driver for nothing"


def calls_of_close() -> list[tuple[str, int]]:
    job = two_gpus()
    arenas = job.open_all()
    before = Counter(job.drivers[0].calls)
    job.close_all(arenas)
    return [(name, nth) for name, n in (Counter(job.drivers[0].calls) - before).items() for nth in range(1, n + 1)]


@pytest.mark.parametrize("name, nth", calls_of_close())
def test_a_failing_call_in_close_stops_nothing_else(name: str, nth: int, caplog: pytest.LogCaptureFixture) -> None:
    job = two_gpus()
    arenas = job.open_all()
    before = Counter(job.drivers[0].calls)
    job.drivers[0].fail_at(name, nth)
    outcomes = job.close_all(arenas)
    after = Counter(job.drivers[0].calls) - before
    assert isinstance(outcomes[0], ResourceError) and outcomes[1] is None and name in str(outcomes[0])
    assert name in caplog.text
    assert after["cuDevicePrimaryCtxRelease"] == 1 or name == "cuDeviceGet"
    assert after["cuMemFree"] == 1 or name == "cuCtxPushCurrent"
    assert job.world.complaints == []


def test_views_are_bounded_and_end_with_the_arena() -> None:
    job = two_gpus()
    arenas = job.open_all()
    for bad in [(2, 0, (1,)), (-1, 0, (1,)), (0, -4, (1,)), (0, NBYTES - 4, (2,)), (0, 2, (1,)), (0, 0, (-1,))]:
        with pytest.raises(InvalidArgument):
            arenas[0].tensor(*bad, torch.float32)
    job.close_all(arenas)
    with pytest.raises(GroupAborted):
        arenas[0].tensor(0, 0, (1,), torch.float32)


def test_a_closed_group_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    job = two_gpus()
    job.close_all(job.open_all())
    assert caplog.records == []
