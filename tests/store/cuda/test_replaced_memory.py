"""The memory of a group whose lost rank another process replaces: at the same addresses, over a fake driver that
enforces CUDA's rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.marks import some
from tests.store.cuda.fake_driver import FakeCuda
from tests.store.cuda.jobs import Job, calls_of, works
from tests.store.fake_control import FakeGroup
from tests.store.store_ranks import in_threads
from tricomm.deadline import Deadline
from tricomm.errors import PeerDied, ResourceError
from tricomm.store.arenas.cuda_arena import CudaArena
from tricomm.store.arenas.cuda_ipc import open_cuda_ipc
from tricomm.store.arenas.cuda_vmm import open_cuda_vmm
from tricomm.store.cuda.cuda_driver import DESCRIPTOR, FABRIC

VISIBLE = [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
LOST = 1


class Replaced:
    """A group of three whose rank 1 was killed and has a new process. `again` has their new pages."""

    def __init__(self, multicast: bool = False, sharing: str = DESCRIPTOR) -> None:
        self.job = Job(FakeCuda(3), VISIBLE, partial(open_cuda_vmm, sharing=sharing))
        self.multicast, self.sharing = multicast, sharing
        self.old = self.job.open_all(self._opened)
        self.places = [(arena.bases, arena.multicast, arena.control_address) for arena in self.old]
        self.job.kill(LOST)
        for rank in (0, 2):
            self.old[rank].suspend()
        self.again = Job(self.job.world, VISIBLE)
        self.meet()

    def meet(self) -> None:
        """New pages for all ranks, and a new process for rank 1."""
        again, old = self.again, self.job
        again.group = FakeGroup(3)
        again.drivers = [old.drivers[0], old.world.process(VISIBLE[LOST]), old.drivers[2]]
        for rank in (0, 2):
            before, now = old.group.controls[rank].host_words, again.group.controls[rank]
            now.host_words = before.follow(now.host_words.address)

    def _opened(self, rank: int) -> CudaArena:
        arena = self.job.open(rank)
        if self.multicast:
            arena.look_for_switch(Deadline(10.0))
        return arena

    def opened(self, rank: int) -> CudaArena:
        """The rank's part in sharing memory again."""
        lender = None if rank == LOST else self.old[rank]
        control: Any = self.again.group.controls[rank]
        device, driver = torch.device("cuda:0"), self.again.drivers[rank]
        arena = open_cuda_vmm(control, 4096, device, 10.0, driver, None, self.sharing, lender)
        try:
            if self.multicast:
                arena.look_for_switch(Deadline(10.0))
            return arena
        except BaseException:
            arena.close()
            raise

    def open_all(self) -> list[Any]:
        return in_threads(3, self.opened)

    def take_over(self, arenas: list[CudaArena]) -> None:
        for rank, arena in enumerate(arenas):
            arena.own()
            if rank != LOST:
                self.old[rank].close()
                self.job.group.controls[rank].close()

    def end(self, arenas: list[CudaArena]) -> None:
        in_threads(3, lambda rank: arenas[rank].close())
        self.again.verify()

    def check(self, arenas: list[Any]) -> None:
        """All ranks share memory, and the survivors have it where it was."""
        assert all(isinstance(arena, CudaArena) for arena in arenas), arenas
        for rank in (0, 2):
            arena = arenas[rank]
            assert (arena.bases, arena.multicast, arena.control_address) == self.places[rank]
        works(self.again, arenas)
        assert not self.multicast or all(arena.multicast for arena in arenas)


@pytest.mark.parametrize(
    ("multicast", "sharing"), [(False, DESCRIPTOR), (True, DESCRIPTOR), (False, FABRIC), (True, FABRIC)]
)
def test_the_survivors_find_new_memory_at_the_old_addresses(multicast, sharing):
    replaced = Replaced(multicast, sharing)
    arenas = replaced.open_all()
    replaced.check(arenas)
    replaced.take_over(arenas)
    works_again = [arena.bases for arena in arenas]
    in_threads(3, lambda rank: arenas[rank].suspend())
    controls: Any = replaced.again.group.controls
    assert in_threads(3, lambda rank: arenas[rank].resume(controls[rank], 10.0)) == [None] * 3
    assert [arena.bases for arena in arenas] == works_again
    works(replaced.again, arenas)
    replaced.end(arenas)


def _calls(multicast: bool) -> list[tuple[int, str, int]]:
    replaced = Replaced(multicast)
    return calls_of(replaced.again, replaced.open_all)


CALLS = [(multicast, *call) for multicast in (False, True) for call in _calls(multicast)]


@pytest.mark.parametrize(
    ("multicast", "rank", "name", "nth"), some(CALLS, lambda number, call: call[3] == 1 and number % 3 != 2)
)
def test_any_failing_call_fails_all_ranks_and_the_addresses_stay(multicast, rank, name, nth):
    replaced = Replaced(multicast)
    replaced.again.drivers[rank].fail_at(name, nth)
    outcomes = replaced.open_all()
    if all(isinstance(outcome, CudaArena) for outcome in outcomes):  # without the switch
        assert multicast and not any(arena.multicast for arena in outcomes)
        in_threads(3, lambda rank: outcomes[rank].close())
    else:
        assert [type(outcome) for outcome in outcomes] == [ResourceError] * 3, outcomes
    assert sum(replaced.job.world.used(gpu) for gpu in range(3)) == 0
    for control in replaced.again.group.controls:
        control.close()
    replaced.again.drivers[LOST].kill()
    replaced.meet()
    arenas = replaced.open_all()
    replaced.check(arenas)
    replaced.take_over(arenas)
    replaced.end(arenas)


def test_a_new_rank_that_dies_leaves_the_survivors_their_addresses(monkeypatch):
    replaced = Replaced()
    driver = replaced.again.drivers[LOST]
    usual = driver._call

    def dying(name: str, *arguments: object) -> Any:
        if not driver.process.alive:
            return 0
        if name == "cuMemImportFromShareableHandle":
            driver.kill()
            replaced.again.group.kill(LOST)
            raise SystemExit
        return usual(name, *arguments)

    monkeypatch.setattr(driver, "_call", dying)
    outcomes = in_threads(3, lambda rank: _or_dead(lambda: replaced.opened(rank)))
    assert [type(outcomes[rank]) for rank in (0, 2)] == [PeerDied] * 2, outcomes
    for rank in (0, 2):
        replaced.again.group.controls[rank].close()
    replaced.meet()
    arenas = replaced.open_all()
    replaced.check(arenas)
    replaced.take_over(arenas)
    replaced.end(arenas)


def _or_dead(action: Any) -> Any:
    try:
        return action()
    except SystemExit:
        return "dead"


def test_without_the_lender_the_memory_is_elsewhere(monkeypatch):
    replaced = Replaced()
    for rank in (0, 2):
        monkeypatch.setattr(replaced.old[rank]._blocks, "_mapped", {})
    arenas = replaced.open_all()
    assert all(arenas[rank].bases != replaced.places[rank][0] for rank in (0, 2))


def test_memory_of_legacy_ipc_is_refused():
    job = Job(FakeCuda(2), [[0, 1], [1, 0]], open_cuda_ipc)
    arenas = job.open_all()
    with pytest.raises(ResourceError, match="cuda_ipc memory cannot be used again"):
        control: Any = job.group.controls[0]
        open_cuda_vmm(control, 4096, torch.device("cuda:0"), 5.0, job.drivers[0], lender=arenas[0])
    job.end()
