"""Ranks as fake processes that share GPU memory, against a driver that enforces CUDA's rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tests.store.cuda.fake_driver import FakeCuda, FakeDriver
from tests.store.fake_control import FakeGroup
from tests.store.store_ranks import in_threads
from tricomm.errors import ResourceError
from tricomm.store.arenas.cuda_arena import CudaArena
from tricomm.store.arenas.cuda_vmm import open_cuda_vmm

NBYTES = 4096
GRANULE = 2 << 20


class Job:
    """Ranks as fake processes on one fake machine; rank r sees the GPUs `visible[r]` and uses its first."""

    def __init__(self, world: FakeCuda, visible: list[list[int]], how: Any = open_cuda_vmm) -> None:
        self.world, self.size, self.how = world, len(visible), how
        self.group = FakeGroup(self.size)
        self.drivers: list[FakeDriver] = [world.process(gpus) for gpus in visible]
        self.opened: list[list[CudaArena]] = []

    def open(self, rank: int, nbytes: int = NBYTES, device: str = "cuda:0", reach: Any = None) -> CudaArena:
        control, driver = self.group.controls[rank], self.drivers[rank]
        return self.how(control, nbytes, torch.device(device), 10.0, driver, reach)

    def open_all(self, open_one: Callable[[int], Any] | None = None) -> list[CudaArena]:
        arenas = in_threads(self.size, open_one or self.open)
        assert all(isinstance(arena, CudaArena) for arena in arenas), arenas
        self.opened.append(arenas)
        return arenas

    def close_all(self, arenas: list[CudaArena]) -> list[Any]:
        return in_threads(self.size, lambda rank: arenas[rank].close())

    def kill(self, rank: int) -> None:
        """End the rank's process."""
        self.drivers[rank].kill()
        self.group.kill(rank)

    def close_opened(self) -> None:
        """Close whatever is open on the ranks that are running."""
        living = [rank for rank, driver in enumerate(self.drivers) if driver.process.alive]
        for arenas in reversed(self.opened):
            closed = in_threads(self.size, lambda rank: arenas[rank].close() if rank in living else None)  # noqa: B023
            assert closed == [None] * self.size

    def end(self) -> None:
        """Close what is open and check that nothing is left."""
        self.close_opened()
        self.verify()

    def verify(self) -> None:
        """Close the control pages and check that no resource is left."""
        for control in self.group.controls:
            control.close()
        self.world.verify()


def two_gpus(how: Any = open_cuda_vmm) -> Job:
    return Job(FakeCuda(2), [[0, 1], [1, 0]], how)


def refused(outcomes: list[Any], kind: type[Exception], *words: str) -> None:
    for outcome in outcomes:
        assert type(outcome) is kind, outcome
        for word in words:
            assert word in str(outcome), outcome


def calls_of(job: Job, act: Callable[[], Any] | None = None) -> list[tuple[int, str, int]]:
    """(rank, call, number of calls) that `act` (default: a set-up) makes without a fault; closes what is open."""
    before = [Counter(driver.calls) for driver in job.drivers]
    (act or job.open_all)()
    counts = [Counter(driver.calls) - old for driver, old in zip(job.drivers, before, strict=True)]
    job.close_opened()
    made = [(rank, name, n) for rank, by_name in enumerate(counts) for name, n in by_name.items()]
    return [(rank, name, nth) for rank, name, n in made for nth in range(1, n + 1)]


def fails_on_all(job: Job, rank: int, name: str, nth: int) -> None:
    """The `nth` call of `name` on `rank` fails: no rank gets memory, and nothing is left."""
    job.drivers[rank].fail_at(name, nth)
    outcomes = in_threads(job.size, job.open)
    refused(outcomes, ResourceError, f"rank {rank}", name, "CUDA_ERROR_UNKNOWN", "CUDA's own words")
    job.verify()


def works(job: Job, arenas: list[CudaArena]) -> None:
    """Check that the blocks are zeroed, also where the probe wrote, and that every rank reaches every block."""
    for rank, (arena, driver) in enumerate(zip(arenas, job.drivers, strict=True)):
        with arena._site.current():
            assert not any(driver.read(arena.bases[rank], GRANULE))
    for rank, (arena, driver) in enumerate(zip(arenas, job.drivers, strict=True)):
        with arena._site.current():
            for target in range(job.size):
                driver.write(arena.bases[target] + 8 * rank, b"%8d" % (100 * rank + target))
    for rank, (arena, driver) in enumerate(zip(arenas, job.drivers, strict=True)):
        with arena._site.current():
            words = driver.read(arena.bases[rank], 8 * job.size).split()
        assert words == [b"%d" % (100 * writer + rank) for writer in range(job.size)]
