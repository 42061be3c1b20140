"""Sharing a user's GPU memory without a copy, over a fake driver that enforces CUDA's rules. No GPU."""

from __future__ import annotations

import pytest
import torch

from tests.marks import some
from tests.store.cuda.fake_driver import FakeCuda, FakeDriver
from tests.store.cuda.jobs import GRANULE, Job, calls_of, refused
from tests.store.store_ranks import in_threads
from tricomm.errors import RendezvousError, ResourceError
from tricomm.store.arenas.cuda_arena import CudaArena
from tricomm.store.arenas.registered_memory import open_registered_gpu

NBYTES = 96


class Users:
    """Two ranks that register memory: rank r's begins `offsets[r]` bytes into an allocation of `pieces[r]` pieces of
    cuMemCreate, or one of cuMemAlloc for 0."""

    def __init__(self, pieces: tuple[int, int] = (1, 1), offsets: tuple[int, int] = (4096, 64)) -> None:
        self.job = Job(FakeCuda(2), [[0, 1], [1, 0]])
        self.offsets = offsets
        self.bases, self.contexts = [], []
        self._pieces: list[list[tuple[int, int]]] = []
        for driver, count in zip(self.job.drivers, pieces, strict=True):
            driver.init()
            self.contexts.append(driver.retain_context(0))
            with driver.current(self.contexts[-1]):
                self.bases.append(self._vmm(driver, count) if count else driver.mem_alloc(2 * GRANULE))
        self.addresses = [base + offset for base, offset in zip(self.bases, offsets, strict=True)]

    def _vmm(self, driver: FakeDriver, count: int) -> int:
        base = driver.address_reserve(count * GRANULE, GRANULE)
        made = []
        for number in range(count):
            made.append((driver.mem_create(0, GRANULE), base + number * GRANULE))
            driver.mem_map(made[-1][1], GRANULE, made[-1][0])
            driver.mem_allow(made[-1][1], GRANULE, 0)
        self._pieces.append(made)
        return base

    def register(self, rank: int, nbytes: int = NBYTES) -> CudaArena:
        control, driver = self.job.group.controls[rank], self.job.drivers[rank]
        return open_registered_gpu(control, self.addresses[rank], nbytes, torch.device("cuda:0"), 10.0, driver)  # type: ignore[arg-type]

    def register_all(self) -> list[CudaArena]:
        return self.job.open_all(self.register)

    def verify(self) -> None:
        """Free the user's memory and check that nothing else is left."""
        self.job.close_opened()
        for rank, driver in enumerate(self.job.drivers):
            with driver.current(self.contexts[rank]):
                pieces = self._pieces.pop(0) if driver.process.vmm._ranges else []
                for handle, at in pieces:
                    driver.mem_unmap(at, GRANULE)
                    driver.mem_release(handle)
                if pieces:
                    driver.address_free(self.bases[rank], len(pieces) * GRANULE)
                else:
                    driver.mem_free(self.bases[rank])
            driver.release_context(0)
        self.job.verify()


def works(users: Users, arenas: list[CudaArena]) -> None:
    """Each rank reads the peer's memory as the peer wrote it, and writes to it."""
    job = users.job
    for rank, driver in enumerate(job.drivers):
        assert arenas[rank].bases[rank] == users.addresses[rank]
        with driver.current(users.contexts[rank]):
            driver.write(users.addresses[rank], b"%8d" % rank)
    for rank, driver in enumerate(job.drivers):
        with arenas[rank]._site.current():
            assert driver.read(arenas[rank].bases[1 - rank], 8) == b"%8d" % (1 - rank)
            driver.write(arenas[rank].bases[1 - rank] + NBYTES - 8, b"%8d" % (10 + rank))
    for rank, driver in enumerate(job.drivers):
        with driver.current(users.contexts[rank]):
            assert driver.read(users.addresses[rank] + NBYTES - 8, 8) == b"%8d" % (11 - rank)


@pytest.mark.parametrize(
    "pieces, offsets, kind",
    [
        ((1, 1), (4096, 64), "cuda_vmm"),
        ((3, 3), (2 * GRANULE, 16), "cuda_vmm"),
        ((0, 0), (GRANULE + 512, 16), "cuda_ipc"),
    ],
)
def test_registered_memory_is_accessed_without_a_copy(pieces, offsets, kind):
    users = Users(pieces, offsets)
    for _ in range(2):
        arenas = users.register_all()
        assert {arena.kind for arena in arenas} == {kind}
        works(users, arenas)
        assert users.job.close_all(arenas) == [None, None]
    users.verify()


def test_memory_over_several_allocations_is_mapped_contiguously():
    users = Users((2, 2), (GRANULE - 48, GRANULE - 48))
    arenas = users.register_all()
    for rank, driver in enumerate(users.job.drivers):
        with driver.current(users.contexts[rank]):
            driver.write(users.bases[rank] + GRANULE - 8, b"left %3d" % rank)
            driver.write(users.bases[rank] + GRANULE, b"righ %3d" % rank)
    for rank, driver in enumerate(users.job.drivers):
        with arenas[rank]._site.current():
            there = arenas[rank].bases[1 - rank] + 48
            assert driver.read(there - 8, 8) + driver.read(there, 8) == b"left %3drigh %3d" % (1 - rank, 1 - rank)
    users.verify()


def _calls(pieces: tuple[int, int]) -> list[tuple[int, str, int]]:
    users = Users(pieces)
    return calls_of(users.job, users.register_all)


BY_DESCRIPTOR, LEGACY = _calls((1, 1)), _calls((0, 0))
# These calls only find out whether memory is of cuMemCreate: if one fails, it is not.
ASKING = {("cuMemRetainAllocationHandle", 1), ("cuMemRelease", 1)}
# Releases of a handle and of a context, which CUDA has refused.
GIVING_BACK = {("cuMemRelease", 1), ("cuDevicePrimaryCtxRelease", 1), ("cuDeviceGet", 2)}


@pytest.mark.parametrize("rank, name, nth", some(BY_DESCRIPTOR, lambda number, call: call[0] == 1 and call[2] == 1))
def test_any_failing_call_fails_all_ranks_and_leaves_nothing(rank, name, nth):
    _failing((1, 1), rank, name, nth)


@pytest.mark.parametrize("rank, name, nth", some(LEGACY, lambda number, call: call[0] == 0 and "Ipc" in call[1]))
def test_any_failing_call_of_legacy_ipc_fails_all_ranks_and_leaves_nothing(rank, name, nth):
    _failing((0, 0), rank, name, nth)


def _failing(pieces: tuple[int, int], rank: int, name: str, nth: int) -> None:
    if pieces == (0, 0) and name == "cuMemRetainAllocationHandle":
        return  # the set-up fails in any case
    users = Users(pieces)
    driver = users.job.drivers[rank]
    driver.fail_at(name, nth)
    outcomes = in_threads(2, users.register)
    words = ("different kinds",) if (name, nth) in ASKING else (f"rank {rank}", name, "CUDA_ERROR_UNKNOWN")
    refused(outcomes, ResourceError, *words)
    assert users.job.world.complaints == []
    if (name, nth) not in GIVING_BACK:
        users.verify()


def test_ranks_with_different_memory_get_an_error():
    users = Users((1, 0))
    refused(in_threads(2, users.register), ResourceError, "rank 0 by descriptor", "rank 1 by legacy CUDA IPC")
    users.verify()
    users = Users((2, 2), (GRANULE - 48, 0))
    refused(in_threads(2, users.register), ResourceError, "different numbers of allocations, by rank [2, 1]")
    users.verify()
    users = Users()
    refused(in_threads(2, lambda rank: users.register(rank, NBYTES * (rank + 1))), RendezvousError, "192", "96")
    users.verify()


def test_more_allocations_than_a_message_takes_are_refused():
    users = Users((9, 9), (0, 0))
    refused(in_threads(2, lambda rank: users.register(rank, 9 * GRANULE)), ResourceError, "more than 8 allocations")
    users.verify()


def test_a_rank_that_is_killed_leaves_nothing():
    users = Users()
    arenas = users.register_all()
    users.job.drivers[1].kill()
    users.job.group.kill(1)
    arenas[0].close()
    assert users.job.world.complaints == []
