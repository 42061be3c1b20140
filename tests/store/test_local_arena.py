"""Ranks in one process: on the CPU, and on GPUs over the fake driver."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from tests.store.cuda.fake_driver import FakeCuda, FakeDriver
from tricomm.errors import GroupAborted, InvalidArgument, ResourceError
from tricomm.store.arenas.arena import raw_view
from tricomm.store.arenas.local_arena import LocalGroup, host_page_address
from tricomm.store.host_words import HostWords

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool]


def pages(number: int) -> list[HostWords]:
    """Control pages, which belong to the test."""
    memory = [mmap.mmap(-1, 4096) for _ in range(number)]
    return [HostWords(page, host_page_address(page)) for page in memory]


def test_all_ranks_see_the_same_zeroed_blocks():
    arenas = LocalGroup(3, CPU, pages(3)).open(10_000)
    assert len({arena.bases for arena in arenas}) == 1
    for rank, arena in enumerate(arenas):
        assert (arena.kind, arena.rank, arena.nbytes, arena.stream) == ("local", rank, 10_000, None)
        assert all(base % 4096 == 0 for base in arena.bases) and len(set(arena.bases)) == 3
        assert not arena.tensor(rank, 0, (10_000,), torch.uint8).any()
        arena.tensor(rank, 8, (2, 2), torch.float32).fill_(rank)
    for arena in arenas:
        for rank in range(3):
            view = arena.tensor(rank, 8, (4,), torch.float32)
            assert view.data_ptr() == arena.bases[rank] + 8
            assert torch.equal(view, torch.full((4,), float(rank)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_views(dtype):
    (arena,) = LocalGroup(1, CPU, pages(1)).open(4096)
    view = arena.tensor(0, 16, (2, 3), dtype)
    assert (view.dtype, view.shape, view.data_ptr()) == (dtype, (2, 3), arena.bases[0] + 16)
    raw = raw_view(arena.bases[0] + 16, (2, 3), dtype, CPU)
    assert (raw.dtype, raw.shape, raw.stride(), raw.data_ptr()) == (dtype, (2, 3), (3, 1), view.data_ptr())
    raw.view(torch.uint8).fill_(1)
    assert torch.equal(view.view(torch.uint8), raw.view(torch.uint8))
    assert not arena.tensor(0, 16 + 6 * dtype.itemsize, (8,), torch.uint8).any()


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), ()])
def test_odd_shapes(shape):
    (arena,) = LocalGroup(1, CPU, pages(1)).open(64)
    assert arena.tensor(0, 64 if 0 in shape else 60, shape, torch.int32).shape == shape
    assert raw_view(arena.bases[0], shape, torch.int32, CPU).shape == shape


def test_each_rank_has_its_own_control_page():
    words = pages(2)
    arenas = LocalGroup(2, CPU, words).open(64)
    assert [arena.control_address for arena in arenas] == [page.address for page in words]
    for arena in arenas:
        ctypes.memset(arena.control_address, 1, 4096)


def test_one_rank_may_close_before_the_others_are_done():
    arenas = LocalGroup(2, CPU, pages(2)).open(64)
    view = arenas[1].tensor(0, 0, (16,), torch.float32)
    arenas[0].close()
    arenas[0].close()
    view.fill_(1.0)
    assert arenas[1].tensor(0, 0, (16,), torch.float32).sum() == 16
    with pytest.raises(GroupAborted):
        arenas[0].tensor(0, 0, (1,), torch.float32)
    arenas[1].close()
    view.fill_(2.0)  # a tensor keeps host memory alive, so nothing can crash


@pytest.mark.parametrize("world_size, nbytes, device", [(0, 64, "cpu"), (1, 0, "cpu"), (1, -1, "cpu"), (1, 64, "meta")])
def test_bad_arguments(world_size, nbytes, device):
    with pytest.raises(InvalidArgument):
        LocalGroup(world_size, torch.device(device), pages(world_size)).open(nbytes)


def test_memory_that_does_not_exist_is_refused():
    with pytest.raises(ResourceError, match="smaller arena"):
        LocalGroup(4, CPU, pages(4)).open(1 << 46)


def fake_gpu() -> tuple[FakeCuda, FakeDriver]:
    world = FakeCuda()
    return world, world.process()


def test_gpu_blocks_live_until_the_last_rank_closes():
    world, driver = fake_gpu()
    words = pages(2)
    group = LocalGroup(2, GPU, words, driver)
    first, second = group.open(4096), group.open(64)
    for arenas in (first, second):
        assert len(set(arenas[0].bases)) == 2 and arenas[0].bases == arenas[1].bases
        assert len({a.control_address for a in arenas} | {page.address for page in words}) == 4
        with driver.current(1000):
            assert driver.read(arenas[1].bases[0], arenas[0].nbytes) == bytes(arenas[0].nbytes)
    first[0].close()
    first[0].close()
    assert "cuMemAddressFree" not in driver.calls
    driver.process.kernel_running = True
    first[1].close()
    assert driver.calls.count("cuMemAddressFree") == 2
    for owned in (*second, *words):
        owned.close()
    world.verify()


def calls_of_open() -> list[tuple[str, int]]:
    _, driver = fake_gpu()
    LocalGroup(2, GPU, pages(2), driver).open(4096)
    return [(name, nth) for name in set(driver.calls) for nth in range(1, driver.calls.count(name) + 1)]


@pytest.mark.parametrize("name, nth", sorted(calls_of_open()))
def test_any_failing_call_leaves_nothing(name, nth):
    world, driver = fake_gpu()
    driver.fail_at(name, nth)
    words = pages(2)
    if name == "cuDeviceGetAttribute":  # the driver may lack the attribute, so another kind of memory is used
        for arena in LocalGroup(2, GPU, words, driver).open(4096):
            arena.close()
    else:
        with pytest.raises(ResourceError, match=name):
            LocalGroup(2, GPU, words, driver).open(4096)
    for page in words:
        page.close()
    world.verify()


def test_a_failing_close_frees_what_it_can():
    world, driver = fake_gpu()
    words = pages(2)
    arenas = LocalGroup(2, GPU, words, driver).open(4096)
    driver.fail_at("cuCtxSynchronize")
    arenas[0].close()
    with pytest.raises(ResourceError, match="cuCtxSynchronize"):
        arenas[1].close()
    for page in words:
        page.close()
    world.verify()
