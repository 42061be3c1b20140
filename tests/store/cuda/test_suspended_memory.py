"""suspend() and resume() of GPU memory at the same addresses, over a fake driver that enforces CUDA's rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.marks import some
from tests.store.cuda.fake_driver import FakeCuda, FakeDriver
from tests.store.cuda.jobs import Job, calls_of, refused, two_gpus, works
from tests.store.store_ranks import in_threads
from tricomm.errors import PeerDied, ResourceError
from tricomm.store.arenas.cuda_arena import CudaArena
from tricomm.store.arenas.cuda_ipc import open_cuda_ipc
from tricomm.store.arenas.local_arena import LocalGroup


def suspend(job: Job, arenas: list[CudaArena]) -> list[Any]:
    return in_threads(job.size, lambda rank: arenas[rank].suspend())


def resume(job: Job, arenas: list[CudaArena]) -> list[Any]:
    return in_threads(job.size, lambda rank: arenas[rank].resume(job.group.controls[rank], 10.0))  # type: ignore[arg-type]


def used(job: Job) -> int:
    return sum(job.world.used(gpu) for gpu in range(job.world.gpus))


@pytest.mark.parametrize("gpus, visible", [(1, [[0]]), (1, [[0], [0]]), (3, [[0, 1, 2], [2, 0, 1], [1, 2, 0]])])
def test_memory_is_freed_and_mapped_again_at_the_same_addresses(verified, gpus, visible):
    job = verified(Job(FakeCuda(gpus), visible))
    arenas = job.open_all()
    bases, full = [arena.bases for arena in arenas], used(job)
    for _ in range(2):
        works(job, arenas)
        for driver in job.drivers:
            driver.process.kernel_running = True
        assert suspend(job, arenas) == [None] * job.size
        assert used(job) == 0 and all(arena.suspended for arena in arenas)
        assert resume(job, arenas) == [None] * job.size
        assert used(job) == full and [arena.bases for arena in arenas] == bases
    works(job, arenas)
    suspend(job, arenas)


def _calls(what: Any) -> list[tuple[int, str, int]]:
    job = two_gpus()
    arenas = job.open_all()
    if what is resume:
        suspend(job, arenas)
    return calls_of(job, partial(what, job, arenas))


SUSPEND, RESUME = _calls(suspend), _calls(resume)


@pytest.mark.parametrize("rank, name, nth", some(SUSPEND, lambda number, call: call[0] == 1))
def test_a_failing_call_of_suspend_is_reported_and_resume_recovers(job, arenas, rank, name, nth):
    job.drivers[rank].fail_at(name, nth)
    outcomes = suspend(job, arenas)
    refused([outcomes[rank]], ResourceError, name, "CUDA_ERROR_UNKNOWN")
    assert outcomes[1 - rank] is None
    assert resume(job, arenas) == [None, None]
    works(job, arenas)


@pytest.mark.parametrize("rank, name, nth", some(RESUME, lambda number, call: call[0] == 1 and call[2] == 1))
def test_any_failing_call_of_resume_fails_all_ranks_and_can_be_repeated(job, arenas, rank, name, nth):
    suspend(job, arenas)
    job.drivers[rank].fail_at(name, nth)
    refused(resume(job, arenas), ResourceError, f"rank {rank}", name, "CUDA_ERROR_UNKNOWN")
    assert used(job) == 0 and all(arena.suspended for arena in arenas)
    assert resume(job, arenas) == [None, None]
    works(job, arenas)


def test_memory_that_another_process_took_meanwhile_is_named_and_resume_can_be_repeated(verified):
    job = verified(Job(FakeCuda(2, capacity=3 << 20), [[0, 1], [1, 0]]))
    arenas = job.open_all()
    suspend(job, arenas)
    with arenas[1]._site.current():
        taken = job.drivers[1].mem_alloc(2 << 20)
    refused(resume(job, arenas), ResourceError, "rank 1", "CUDA_ERROR_OUT_OF_MEMORY")
    assert used(job) == 2 << 20, "only the other rank's memory"
    with arenas[1]._site.current():
        job.drivers[1].mem_free(taken)
    assert resume(job, arenas) == [None, None]
    works(job, arenas)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemImportFromShareableHandle", "cuMemcpyDtoH"])
def test_a_rank_that_dies_in_resume_is_named_and_leaves_nothing(call, monkeypatch):
    job = two_gpus()
    arenas = job.open_all()
    suspend(job, arenas)
    usual = job.drivers[1]._call

    def dying(name: str, *arguments: object) -> Any:
        if name == call:
            job.drivers[1].kill()
            job.group.kill(1)
            raise SystemExit
        return usual(name, *arguments)

    monkeypatch.setattr(job.drivers[1], "_call", dying)
    blocks: Any = arenas[1]._blocks
    monkeypatch.setattr(blocks, "give_back", lambda undo: blocks._passing.abandon())
    outcomes = in_threads(2, lambda rank: _or_dead(rank, lambda: resume_one(job, arenas, rank)))
    assert isinstance(outcomes[0], PeerDied) and "[1]" in str(outcomes[0]), outcomes[0]
    arenas[0].close()
    job.group.controls[0].close()
    job.world.verify()


def resume_one(job: Job, arenas: list[CudaArena], rank: int) -> None:
    arenas[rank].resume(job.group.controls[rank], 10.0)  # type: ignore[arg-type]


def _or_dead(rank: int, action: Any) -> Any:
    try:
        return action()
    except SystemExit:
        return "dead"


def test_without_waiting_for_kernels_cuda_complains(monkeypatch):
    job = two_gpus()
    arenas = job.open_all()
    monkeypatch.setattr(FakeDriver, "synchronize", lambda self: None)
    job.drivers[0].process.kernel_running = True
    suspend(job, arenas)
    assert any("while a kernel runs" in text for text in job.world.complaints)


def test_without_unmapping_after_a_refusal_memory_is_mapped_over_memory(monkeypatch):
    job = two_gpus()
    arenas = job.open_all()
    job.drivers[0].fail_at("cuMemUnmap")
    suspend(job, arenas)
    monkeypatch.setattr("tricomm.store.cuda.mapped_memory.MappedMemory.require_empty", lambda self, undo: None)
    refused(resume(job, arenas), ResourceError, "cuMemMap", "CUDA_ERROR_INVALID_VALUE")


def test_legacy_ipc_refuses_suspension(verified):
    job = verified(two_gpus(open_cuda_ipc))
    arenas = job.open_all()
    for arena in arenas:
        assert "legacy CUDA IPC cannot map memory again at the same addresses" in arena.no_suspend
        assert "make a new one" in arena.no_suspend and "tricomm doctor" in arena.no_suspend


def test_ranks_of_one_process_on_a_gpu(verified):
    job = verified(Job(FakeCuda(1), [[0], [0]]))
    driver = job.drivers[0]
    pages = [control.host_words for control in job.group.controls]
    arenas: list[Any] = LocalGroup(2, torch.device("cuda", 0), pages, driver).open(5000)
    assert [arena.no_suspend for arena in arenas] == ["", ""]
    bases = arenas[0].bases
    for name, nth in ((None, 0), ("cuMemUnmap", 2), ("cuMemRelease", 1), ("cuMemCreate", 1), ("cuMemMap", 2)):
        if name is not None:
            driver.fail_at(name, nth)
        given = suspend(job, arenas)
        assert name not in ("cuMemUnmap", "cuMemRelease") or any(isinstance(o, ResourceError) for o in given)
        assert name is not None or used(job) == 0
        outcomes = resume(job, arenas)
        if name in ("cuMemCreate", "cuMemMap"):
            refused(outcomes, ResourceError, name)
            assert used(job) == 0
            outcomes = resume(job, arenas)
        assert outcomes == [None, None] and arenas[1].bases == bases
        driver.init()
        context = driver.retain_context(0)
        with driver.current(context):
            for base in bases:
                assert not any(driver.read(base, 5000))
                driver.write(base, b"x" * 5000)
        driver.release_context(0)
    job.close_all(arenas)


def test_a_gpu_without_such_memory_serves_local_ranks_that_cannot_suspend(verified):
    job = verified(Job(FakeCuda(1), [[0]]))
    job.drivers[0].process.vmm.supported = False
    pages = [control.host_words for control in job.group.controls]
    (arena,) = LocalGroup(1, torch.device("cuda", 0), pages, job.drivers[0]).open(5000)
    assert "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0" in arena.no_suspend
    arena.close()
