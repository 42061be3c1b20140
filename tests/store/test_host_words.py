"""Registered host memory is unregistered before it is unmapped, however a group ends."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tests.store.cuda.fake_driver import FakeCuda, FakeDriver
from tests.store.fake_host import identity
from tricomm import communicator
from tricomm.communicator import Communicator
from tricomm.core import bootstrap
from tricomm.core.calls.point_to_point import PointToPoint
from tricomm.core.group import PROCESSES, Group
from tricomm.core.launcher import Launcher
from tricomm.errors import GroupAborted, ResourceError
from tricomm.kernels import layout
from tricomm.options import Options, digest_of
from tricomm.store import host_words
from tricomm.store.arenas.cuda_ipc import open_cuda_ipc
from tricomm.store.arenas.local_arena import LocalGroup
from tricomm.store.control import ControlPage
from tricomm.store.handshake import handshake
from tricomm.store.host_words import HostWords
from tricomm.store.segments import Segment

CPU = torch.device("cpu")
OPTIONS = Options(timeout=20.0, arena_bytes=2 << 20)
PLAN = layout.plan(2, OPTIONS.arena_bytes)


@pytest.fixture
def world() -> Iterator[FakeCuda]:
    """Drops memory that a test kept on purpose, so that the next test does not see it."""
    yield FakeCuda(2)
    host_words._registered.clear()
    communicator._kept.clear()


def ready(world: FakeCuda) -> FakeDriver:
    driver = world.process()
    driver.init()
    return driver


def words_of(segment: Segment) -> HostWords:
    return HostWords(segment.buffer, segment.address)


def touch(driver: FakeDriver, address: int, value: int) -> None:
    """Write as a kernel of GPU 0."""
    with driver.current(driver.retain_context(0)):
        driver.write(address, value.to_bytes(8, "little"))
    driver.release_context(0)


def test_close_unregisters_the_page(world):
    driver, memory = ready(world), Segment.create("tricomm-test", 4096)
    words = words_of(memory)
    address = words.on_device(driver, 0)
    assert words.on_device(driver, 0) == address and driver.calls.count("cuMemHostRegister") == 1
    with pytest.raises(ResourceError, match="GPU 0 .* GPU 1"):
        words.on_device(driver, 1)
    touch(driver, address, 7)
    assert memory.buffer[0] == 7
    words.close()
    words.close()
    memory.close()
    assert identity(memory.address) is None
    with pytest.raises(GroupAborted):
        words.on_device(driver, 0)
    world.verify()


@pytest.mark.parametrize("name", ["cuMemHostRegister", "cuMemHostGetDevicePointer", "cuDevicePrimaryCtxRetain"])
def test_a_page_that_is_refused_is_not_held(name, world):
    driver, memory = ready(world), Segment.create("tricomm-test", 4096)
    driver.fail_at(name)
    words = words_of(memory)
    with pytest.raises(ResourceError, match=name):
        words.on_device(driver, 0)
    words.close()
    memory.close()
    assert identity(memory.address) is None and not host_words._registered
    world.verify()


def forgotten(driver: FakeDriver) -> tuple[int, int]:
    """A registered page without references: its addresses on the host and on the device."""
    memory = Segment.create("tricomm-test", 4096)
    device = words_of(memory).on_device(driver, 0)
    memory.close()
    return memory.address, device


def test_registered_memory_stays_mapped_after_its_owner_is_freed(world):
    driver = ready(world)
    address, device = forgotten(driver)
    gc.collect()
    assert identity(address) is not None
    touch(driver, device, 1)
    assert world.complaints == []


def test_without_the_kept_page_a_kernel_would_write_to_unmapped_memory(world, monkeypatch):
    class Nobody(set[Any]):
        def add(self, _: Any) -> None:
            pass

    monkeypatch.setattr(host_words, "_registered", Nobody())
    driver = ready(world)
    address, device = forgotten(driver)
    gc.collect()
    with pytest.raises(AssertionError, match="whose memory went while it was pinned"):
        touch(driver, device, 1)


def test_a_page_that_cuda_does_not_unregister_stays(world, caplog):
    driver, memory = ready(world), Segment.create("tricomm-test", 4096)
    words = words_of(memory)
    words.on_device(driver, 0)
    driver.fail_at("cuMemHostUnregister")
    words.close()
    memory.close()
    assert "stays mapped" in caplog.text and "cuMemHostUnregister" in caplog.text
    assert identity(memory.address) is not None


def test_a_forked_child_drops_its_pages_without_a_cuda_call(world):
    driver, memory = ready(world), Segment.create("tricomm-test", 4096)
    words = words_of(memory)
    words.on_device(driver, 0)
    before = len(driver.calls)
    child = os.fork()
    if child == 0:
        words.close()
        memory.close()
        os._exit(0 if len(driver.calls) == before and identity(memory.address) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    words.close()
    world.verify()


# Groups over the fake driver. The host's side is real; there are no group tables, because no kernel runs


class Job:
    """Two ranks as threads, in one fake process each or in one for both."""

    def __init__(self, world: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.drivers = world, [ready(world), ready(world)]

        def arena(
            control: ControlPage, nbytes: int, device: Any, timeout: float, reach: Any, multicast: bool, lender: Any
        ) -> Any:
            return open_cuda_ipc(control, nbytes, torch.device("cuda", 0), timeout, self.drivers[control.rank], reach)

        monkeypatch.setattr(bootstrap, "open_arena", arena)
        monkeypatch.setattr(Group, "_write_table", lambda self: (torch.empty(0), ()))

    def together(self, body: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(body, range(2)))

    def processes(self) -> list[Communicator]:
        store = HashStore()
        return self.together(lambda rank: Communicator(store, rank, 2, "cpu", options=OPTIONS))

    def local(self) -> list[Communicator]:
        store, agreed = HashStore(), digest_of(OPTIONS, PLAN, "cuda")
        controls = self.together(lambda rank: handshake(store, rank, 2, 20.0, agreed))
        pages = [control.host_words for control in controls]
        self.drivers = [self.drivers[0]] * 2
        arenas = LocalGroup(2, torch.device("cuda", 0), pages, self.drivers[0]).open(PLAN.nbytes)
        return self.together(
            lambda rank: Communicator._over(controls[rank], arenas[rank], PLAN, CPU, 20.0, OPTIONS, PROCESSES)
        )

    def works(self, comm: Communicator, value: int) -> None:
        """The rank reads the value that the device writes to the page."""
        touch(self.drivers[comm.rank], comm._group.arena.control_address + 8 * layout.ENDED, value)  # type: ignore[attr-defined]
        assert comm._group.words[layout.ENDED] == value


@pytest.fixture
def job(world: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(world, monkeypatch)


def test_a_group_leaves_nothing(job):
    comms = job.processes()
    for comm in comms:
        job.works(comm, 5)
    job.together(lambda rank: comms[rank].close())
    job.world.verify()


def a_group(job: Job, value: int) -> int:
    """Make, use and close a group; return the host address of rank 0's page."""
    comms = job.processes()
    for comm in comms:
        job.works(comm, value)
    job.together(lambda rank: comms[rank].close())
    return comms[0]._group.control.device_words


def again_after_an_arena_was_kept(job: Job, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make groups whose arenas are kept, until a page has the address of an earlier one."""
    monkeypatch.setattr(PointToPoint, "acknowledged", lambda self, seconds: False)  # a message to a peer is in flight
    monkeypatch.setattr(communicator.log, "disabled", True)  # else pytest keeps the groups that log records refer to
    seen: set[int] = set()
    for value in range(1, 10):
        address = a_group(job, value)
        if address in seen:
            return True
        seen.add(address)
        gc.collect()
    return False


def test_a_group_after_one_whose_arena_was_kept_has_a_new_page(job, monkeypatch):
    assert again_after_an_arena_was_kept(job, monkeypatch), "no address was reused, so this tested nothing"
    assert job.world.complaints == []
    assert not [text for driver in job.drivers for text in driver.process.holds() if "pinned" in text]


def test_without_unregistering_the_page_the_next_group_gets_the_old_one(job, monkeypatch):
    def forget(self: HostWords) -> None:
        self._memory = self._registration = None
        host_words._registered.clear()

    monkeypatch.setattr(HostWords, "close", forget)
    with pytest.raises((AssertionError, tricomm.TricommError), match="whose memory went while it was pinned"):
        again_after_an_arena_was_kept(job, monkeypatch)


def test_ranks_in_one_process_unregister_their_pages_one_by_one(job):
    for value in range(1, 4):
        one, two = job.local()
        job.works(one, value)
        one.close()
        pinned = job.drivers[0].process.pinned.all
        assert [page.address for page in pinned] == [two._group.control.device_words]
        job.works(two, value)
        three, four = job.local()  # while one rank of the last group is open
        job.works(three, value)
        job.works(four, value)
        job.works(two, value + 1)
        for comm in (two, three, four):
            comm.close()
        del one, two, three, four, comm
        gc.collect()
        job.world.verify()


def test_memory_of_a_kernel_that_does_not_end_stays(job, monkeypatch, caplog):
    comms = job.processes()
    monkeypatch.setattr(Launcher, "drained", lambda self: False)
    for driver in job.drivers:
        driver.process.kernel_running = True
    for comm in comms:
        comm._group.simulated = False
        comm.close()
    address = comms[0]._group.arena.control_address  # type: ignore[attr-defined]
    assert caplog.text.count("a kernel has not left") == 2
    del comm, comms
    gc.collect()
    touch(job.drivers[0], address, 1)
    for driver in job.drivers:
        assert "cuMemHostUnregister" not in driver.calls and "cuMemFree" not in driver.calls
    assert job.world.complaints == []


def test_a_failed_set_up_unregisters_the_page(job):
    job.drivers[1].fail_at("cuMemAlloc")

    def refused(rank: int) -> str:
        with pytest.raises(ResourceError) as error:
            Communicator(store, rank, 2, "cpu", options=OPTIONS)
        return str(error.value)

    store = HashStore()
    assert all("rank 1" in text and "cuMemAlloc" in text for text in job.together(refused))
    job.world.verify()
