"""Sharing GPU memory against a driver that enforces CUDA's rules. No GPU."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.store.cuda.fake_driver import FakeCuda
from tests.store.cuda.jobs import NBYTES, Job, calls_of, refused
from tests.store.store_ranks import in_threads
from tricomm import env
from tricomm.errors import GroupAborted, InvalidArgument, ResourceError
from tricomm.store.arenas import cuda_ipc
from tricomm.store.arenas.cuda_ipc import open_cuda_ipc, parse_record


def ipc_job(world: FakeCuda, visible: list[list[int]]) -> Job:
    return Job(world, visible, open_cuda_ipc)


def two_gpus() -> Job:
    return ipc_job(FakeCuda(2), [[0, 1], [1, 0]])


@pytest.fixture
def job(verified):
    return verified(two_gpus())


def test_blocks_are_freed_only_after_all_have_unmapped_them(verified):
    job = verified(ipc_job(FakeCuda(2), [[0, 1], [1, 0], [0]]))
    arenas = job.open_all()
    for driver in job.drivers:
        driver.process.kernel_running = True
    job.world.log.clear()
    job.close_all(arenas)
    names = [name for _, name in job.world.log]
    assert names.index("cuMemFree") > max(i for i, name in enumerate(names) if name == "cuIpcCloseMemHandle")


def test_control_words_are_mapped_once_for_all_arenas_of_a_process(job):
    first, second = job.open_all(), job.open_all()
    for rank in range(2):
        assert first[rank].control_address == second[rank].control_address
        assert job.drivers[rank].calls.count("cuMemHostRegister") == 1
    job.close_all(first)
    job.close_all(second)
    assert all(driver.process.pinned.all for driver in job.drivers)  # the page belongs to its owner, not to an arena


def test_gpus_that_cannot_reach_each_other_are_refused_by_all(verified):
    job = verified(ipc_job(FakeCuda(2, reachable=lambda a, b: (a, b) != (1, 0)), [[0, 1], [1, 0]]))
    refused(in_threads(2, job.open), ResourceError, "rank 1", "0000:01:00.0", "0000:00:00.0", "cuDeviceCanAccessPeer")


def test_an_invisible_gpu_is_tried_by_opening_its_handle(verified):
    job = verified(ipc_job(FakeCuda(2, reachable=lambda a, b: False), [[0], [1]]))
    refused(in_threads(2, job.open), ResourceError, "cuIpcOpenMemHandle", "PEER_ACCESS_UNSUPPORTED", "--ipc=host")


@pytest.mark.parametrize("variable", ["TRICOMM_P2P_DISABLE", "NCCL_P2P_DISABLE"])
def test_one_rank_that_forbids_peer_access_disables_it_on_all(verified, variable, monkeypatch):
    # The ranks are threads with one environment, so the function that reads it is patched for each rank.
    text = env.text

    def of_rank_1(name: str) -> str | None:
        return "1" if name == variable and threading.current_thread().name == "rank 1" else text(name)

    monkeypatch.setattr(env, "text", of_rank_1)
    job = verified(two_gpus())
    refused(in_threads(2, job.open), ResourceError, "rank 1", variable)
    assert job.drivers[1].calls == []


@pytest.mark.parametrize("nbytes, device", [(15, "cuda:0"), (-1, "cuda:0"), (1 << 60, "cuda:0"), (NBYTES, "cpu")])
def test_bad_arguments_are_refused_by_all(job, nbytes, device):
    outcomes = in_threads(2, lambda rank: job.open(rank, nbytes, device) if rank else job.open(rank))
    refused(outcomes, InvalidArgument, "rank 1")


def test_a_gpu_that_does_not_exist_is_named(job):
    refused(in_threads(2, lambda rank: job.open(rank, NBYTES, "cuda:7")), ResourceError, "CUDA_VISIBLE_DEVICES")


def test_a_forged_handle_is_refused_by_all(job):
    job.group.controls[0].tamper = lambda what, data: data[:-64] + bytes(64) if "memory records" in what else data
    refused(in_threads(2, job.open), ResourceError, "cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_HANDLE")


def test_a_block_is_opened_at_the_offset_in_its_record(verified):
    def shifted(what: str, data: bytes) -> bytes:
        return parse_record(data, 0, NBYTES)._replace(offset=256).pack() if "memory records" in what else data

    job = verified(two_gpus())
    job.group.controls[0].tamper = shifted
    refused(in_threads(2, job.open), ResourceError, "rank 0", "rank(s) [1]", "did not arrive")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_ipc, "CLOSE_SECONDS", 0.3)
    yield


def test_a_dead_peer_does_not_hold_up_close(job, arenas, caplog):
    job.kill(1)
    arenas[0].close()
    assert caplog.records == []


def test_a_silent_peer_holds_up_close_for_its_bound_only(job, arenas, impatient, caplog):
    job.drivers[1].process.die()  # so that the fake frees the block: the peer does not answer, but counts as alive
    arenas[0].close()
    assert "rank(s) [1] did not confirm within 0.3 s" in caplog.text


def test_memory_that_a_peer_cannot_unmap_is_kept(caplog):
    job = two_gpus()
    arenas = job.open_all()
    job.drivers[1].fail_at("cuIpcCloseMemHandle")
    outcomes = job.close_all(arenas)
    assert outcomes[0] is None and isinstance(outcomes[1], ResourceError)
    assert "rank 0 keeps 4096 bytes" in caplog.text
    assert job.world.complaints == []
    assert job.drivers[0].calls.count("cuMemFree") == job.drivers[0].calls.count("cuDevicePrimaryCtxRelease") == 0


def test_memory_that_one_rank_keeps_is_kept_by_all(caplog):
    job = two_gpus()
    arenas = job.open_all()
    arenas[1].close = arenas[1].keep  # type: ignore[method-assign]
    before = Counter(job.drivers[1].calls)
    assert job.close_all(arenas) == [None, None]
    assert "rank 0 keeps 4096 bytes" in caplog.text and job.world.complaints == []
    assert job.drivers[0].calls.count("cuMemFree") == 0
    assert Counter(job.drivers[1].calls) == before, "a rank that keeps its memory makes no driver call"


CLOSING = calls_of(made := two_gpus(), partial(made.close_all, made.open_all()))


@pytest.mark.parametrize("name, nth", [call[1:] for call in CLOSING if call[0] == 0])
def test_a_failing_call_in_close_stops_nothing_else(name, nth, caplog):
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


def test_views_are_bounded_and_end_with_the_arena():
    job = two_gpus()
    arenas = job.open_all()
    for bad in [(2, 0, (1,)), (-1, 0, (1,)), (0, -4, (1,)), (0, NBYTES - 4, (2,)), (0, 2, (1,)), (0, 0, (-1,))]:
        with pytest.raises(InvalidArgument):
            arenas[0].tensor(*bad, torch.float32)
    job.close_all(arenas)
    with pytest.raises(GroupAborted):
        arenas[0].tensor(0, 0, (1,), torch.float32)


def test_a_closed_group_logs_nothing(caplog):
    caplog.set_level(logging.DEBUG)
    job = two_gpus()
    job.close_all(job.open_all())
    assert caplog.records == []
