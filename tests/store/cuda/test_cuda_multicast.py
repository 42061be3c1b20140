"""One address for all ranks' memory, against a driver that enforces CUDA's rules for it. No GPU."""

from __future__ import annotations

import struct
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.explorer.ptx.execution import turns
from tests.marks import some
from tests.store.cuda.fake_driver import FakeCuda
from tests.store.cuda.jobs import GRANULE, NBYTES, Job, calls_of, refused
from tests.store.store_ranks import in_threads
from tricomm import env
from tricomm.deadline import Deadline
from tricomm.errors import GroupAborted, ResourceError, TricommError
from tricomm.explorer.ptx.global_memory import GlobalMemory
from tricomm.explorer.ptx.text.parser import parse
from tricomm.explorer.ptx.units import grid
from tricomm.store.arenas.cuda_arena import CudaArena
from tricomm.store.arenas.cuda_multicast import PROBE

SIZE = 3


def three_gpus() -> Job:
    return Job(FakeCuda(SIZE), [[0, 1, 2], [2, 0, 1], [1, 2, 0]])


def look(arenas: list[CudaArena]) -> list[Any]:
    return in_threads(len(arenas), lambda rank: arenas[rank].look_for_switch(Deadline(10.0)))


def open_all(job: Job, nbytes: int = NBYTES) -> list[CudaArena]:
    """Open arenas and probe multicast; it may be missing."""
    arenas = job.open_all(lambda rank: job.open(rank, nbytes))
    assert not any(look(arenas))
    return arenas


@pytest.fixture
def job(verified):
    return verified(three_gpus())


@pytest.fixture
def arenas(job):
    """Open arenas, which must have multicast."""
    return open_all(job)


def words(job: Job, arenas: list[CudaArena], at: int) -> list[int]:
    """The word at byte `at` of every rank's block."""
    results = []
    for rank, arena in enumerate(arenas):
        with arena._site.current():
            results.append(*struct.unpack("<I", job.drivers[rank].read(arena.bases[rank] + at, 4)))
    return results


def store(job: Job, arenas: list[CudaArena], rank: int, at: int, value: int) -> None:
    """Run on `rank` through the multicast address."""
    driver = job.drivers[rank]
    with arenas[rank]._site.current():
        module = driver.load_module(PROBE)
        driver.launch(module, "store", (arenas[rank].multicast + at, value))
        driver.synchronize()
        driver.unload_module(module)


def test_a_store_reaches_every_block_and_nothing_is_left(job, arenas):
    assert all(arena.multicast and not arena.no_multicast for arena in arenas)
    for rank, arena in enumerate(arenas):
        with arena._site.current():
            assert not any(job.drivers[rank].read(arena.bases[rank], GRANULE)), "no word of the probe is left"
    store(job, arenas, 1, 64, 77)
    assert words(job, arenas, 64) == [77] * SIZE


def test_handles_have_multicast_addresses_and_a_refused_one_harms_no_other(job):
    for driver in job.drivers:
        driver.process.switch.granule = 2 * GRANULE  # more than the granularity of memory
    arenas, handles = open_all(job, 2 * GRANULE), open_all(job, 4 * GRANULE)
    for arena, handle in zip(arenas, handles, strict=True):
        assert arena.multicast and handle.multicast not in (0, arena.multicast)
        assert (arena.multicast | handle.multicast) % (2 * GRANULE) == 0
    store(job, handles, 2, 64, 5)
    assert words(job, handles, 64) == [5] * SIZE and words(job, arenas, 64) == [0] * SIZE
    job.drivers[0].fail_at("cuMulticastBindMem")
    refused = open_all(job, 2 * GRANULE)
    assert not any(each.multicast for each in refused) and "cuMulticastBindMem" in refused[2].no_multicast
    odd = open_all(job)  # one granule of memory
    assert "no multiple of the multicast granularity" in odd[0].no_multicast
    store(job, arenas, 1, 64, 9)
    assert words(job, arenas, 64) == [9] * SIZE
    for each in (handles, refused, odd, arenas):
        assert job.close_all(each) == [None] * SIZE


def nobody_has_it(arenas: list[CudaArena], *parts: str) -> None:
    """And all know why."""
    assert {arena.multicast for arena in arenas} == {0} and len({arena.no_multicast for arena in arenas}) == 1
    for part in parts:
        assert part in arenas[0].no_multicast, arenas[0].no_multicast


CALLS = calls_of(made := three_gpus(), partial(look, made.open_all()))


@pytest.mark.parametrize("rank, name, nth", some(CALLS, 4))
def test_any_failing_call_leaves_all_ranks_without_it_and_the_arena_whole(job, rank, name, nth):
    arenas = job.open_all()
    job.drivers[rank].fail_at(name, nth)
    assert look(arenas) == [None] * SIZE
    nobody_has_it(arenas, f"rank {rank}", name, "CUDA_ERROR_UNKNOWN")
    assert not [text for process in job.world.processes for text in process.switch.holds()]
    job.drivers[rank].process.failures.clear()
    look(arenas)  # everything was undone, so it works now
    assert all(arena.multicast for arena in arenas), arenas[0].no_multicast


def without(change: Any, *told: str) -> None:
    """After `change` of one process's switch no rank has the address, all know the reason, and the arenas work."""
    job = three_gpus()
    change(job.drivers[1].process.switch)
    arenas = open_all(job)
    nobody_has_it(arenas, "rank 1", *told)
    job.close_all(arenas)
    job.verify()


def test_a_missing_or_broken_switch(verified):
    without(lambda switch: setattr(switch, "supported", False), "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED is 0 for GPU")
    without(lambda switch: setattr(switch, "granule", 4 * GRANULE), "no multiple of the multicast granularity")
    without(lambda switch: setattr(switch, "adds_wrong", True), "the switch added 3 words", "and gave")
    job = verified(three_gpus())
    job.drivers[1].process.switch.loses_stores = True
    arenas = open_all(job)
    assert "what rank(s) [1] stored to the multicast address did not arrive" in arenas[0].no_multicast


def test_a_fault_of_the_probe_aborts_the_group_and_is_named(job):
    job.drivers[1].process.switch.faults = True
    arenas = job.open_all()
    refused(look(arenas), GroupAborted, "rank 1", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "restart", "TRICOMM_MULTICAST=0")
    job.kill(1)
    for arena in (arenas[0], arenas[2]):
        arena.close()


def test_a_process_probes_its_switch_once_and_each_gpu_is_probed(job):
    first, second = open_all(job), open_all(job)
    launched = [driver.calls.count("cuLaunchKernel") for driver in job.drivers]
    assert launched == [2] * SIZE and all(arena.multicast for arena in second)
    job.drivers[2].switched.clear()  # as a process that joins later
    third = open_all(job)
    assert [driver.calls.count("cuLaunchKernel") for driver in job.drivers] == [4] * SIZE
    store(job, second, 1, 64, 77)
    assert words(job, second, 64) == [77] * SIZE and words(job, first, 64) == [0] * SIZE
    for each in (third, second, first):
        assert job.close_all(each) == [None] * SIZE


@pytest.mark.parametrize("name", ["GetGranularity", "Create", "AddDevice", "BindMem"])
def test_a_function_that_one_ranks_driver_does_not_have_leaves_all_ranks_without_it(name):
    job, rank = three_gpus(), 0 if name == "Create" else 1
    job.drivers[rank].process.missing = {f"cuMulticast{name}"}
    arenas = open_all(job)
    nobody_has_it(arenas, f"rank {rank}", f'Function "cuMulticast{name}" not found')
    job.close_all(arenas)
    job.verify()


def test_ranks_that_share_a_gpu_and_ranks_that_must_not(monkeypatch):
    job = Job(FakeCuda(1), [[0], [0]])
    arenas = open_all(job)
    assert "cuMulticastAddDevice" in arenas[0].no_multicast and arenas[1].multicast == 0
    job.close_all(arenas)
    job.verify()
    job = three_gpus()
    monkeypatch.setattr(env, "multicast", lambda: threading.current_thread().name != "rank 2")
    arenas = open_all(job)
    assert "rank 2" in arenas[0].no_multicast and "TRICOMM_MULTICAST=0" in arenas[0].no_multicast
    job.close_all(arenas)
    job.verify()


def test_a_rank_that_dies_leaves_nothing_bound(job, arenas):
    job.kill(2)
    for arena in arenas[:2]:
        arena.close()


def test_suspended_memory_is_unbound_and_bound_again_at_the_same_address(job, arenas):
    before = [arena.multicast for arena in arenas]
    assert in_threads(SIZE, lambda rank: arenas[rank].suspend()) == [None] * SIZE
    assert all(not job.world.used(gpu) for gpu in range(SIZE))
    resumed = in_threads(SIZE, lambda rank: arenas[rank].resume(job.group.controls[rank], 10.0))
    assert resumed == [None] * SIZE and [arena.multicast for arena in arenas] == before
    store(job, arenas, 0, 8, 5)
    assert words(job, arenas, 8) == [5] * SIZE
    in_threads(SIZE, lambda rank: arenas[rank].suspend())
    job.drivers[1].fail_at("cuMulticastBindMem")  # captured graphs use the address, so resume must map it again
    outcomes = in_threads(SIZE, lambda rank: arenas[rank].resume(job.group.controls[rank], 10.0))
    assert all(isinstance(each, ResourceError | TricommError) for each in outcomes), outcomes
    assert "cuMulticastBindMem" in str(outcomes[0]) and all(not job.world.used(gpu) for gpu in range(SIZE))


def test_the_probe_matches_its_fake():
    members, out, memory = [np.zeros(16, "u4") for _ in range(SIZE)], np.zeros(4, "u4"), GlobalMemory()
    for array in (*members, out):
        memory.add(array.ctypes.data, array.nbytes, "memory")
    memory.add_multicast(1 << 50, 64, [array.ctypes.data for array in members])
    text = PROBE.rstrip(b"\0").decode()
    for name, values in (("store", ((1 << 50) + 8, 7)), ("sum", ((1 << 50) + 8, out.ctypes.data + 4))):
        loaded = grid.LoadedKernel(parse(text, name), memory)
        turns.run([grid.launch(loaded, (1, 1, 1), (1, 1, 1), 0, struct.pack("<QQ", *values))])
    assert [array[2] for array in members] == [7] * SIZE and out.tolist() == [0, 7 * SIZE, 0, 0]
