"""All ranks in one process: results, seeds, faults and errors as with processes, and no resources left."""

import gc
import queue
import random
import threading
import time
import weakref

import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tests.core.bodies.exact import Made, outcome
from tests.core.bodies.user_kernel import rotate
from tests.explorer import small_kernels as k
from tests.explorer.test_check import words
from tricomm.errors import CollectiveTimeout, InvalidArgument, PeerDied
from tricomm.explorer.compiled import thread_detector
from tricomm.explorer.interpreted import detector
from tricomm.explorer.world import host_state
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import triton_adapter


def patched() -> list[str]:
    return [name for owner, name, old, new in triton_adapter.patches if vars(owner).get(name) is new]


@pytest.fixture(autouse=True)
def triton_is_left_as_it_was():
    yield
    assert patched() == [] and triton_adapter.director is None


@pytest.mark.parametrize("world_size", [1, 2, 5, 8, pytest.param(16, marks=pytest.mark.soak)])
def test_every_world_size_and_every_kernel(world_size):
    known = [k for k in registry.KERNELS if k.collective in ("all_reduce", "all_gather") and not k.needs_cube]
    keys = [(k.collective, k.algorithm, k.protocol) for k in known]
    cases = [Made(*key, "int64", "sum", 7 + 30 * n, 0, "fresh") for n, key in enumerate(keys)]

    def fn(comm):
        wrong = [case for number, case in enumerate(cases) if not outcome(comm, case, number)]
        comm.barrier()
        return wrong

    assert tricomm.simulate(fn, world_size, seed=world_size) == [[]] * world_size


def order_of_turns(seed):
    def fn(comm):
        out = torch.full((6,), -1)
        comm.launch(k.tickets, 1, words(comm).peers, out, WORLD_SIZE=comm.world_size, TIMES=6)
        return out.tolist(), torch.randn(3).tolist(), random.random()

    return tricomm.simulate(fn, 3, seed=seed)


def test_a_seed_is_an_interleaving_to_the_last_bit():
    results = [order_of_turns(seed) for seed in range(6)]
    assert results == [order_of_turns(seed) for seed in range(6)]
    assert len({str([turns for turns, _, _ in ranks]) for ranks in results}) > 3
    assert len({str(ranks[0][1]) for ranks in results}) == 6, "random numbers do not depend on the seed"
    assert len({str(rank[1]) for rank in results[0]}) == 3, "two ranks draw the same numbers"


def test_the_callers_random_numbers_and_grad_mode_are_unchanged():
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.randn(2), random.random()

    def fn(comm):
        torch.rand(7)
        random.random()
        with torch.no_grad() if comm.rank == 0 else torch.enable_grad():
            comm.barrier()
            return torch.is_grad_enabled()

    torch.manual_seed(5)
    random.seed(5)
    assert tricomm.simulate(fn, 3) == [False, True, True]
    assert torch.equal(torch.randn(2), expected[0]) and random.random() == expected[1] and torch.is_grad_enabled()


def test_a_users_kernel_over_symmetric_memory():
    def fn(comm):
        memory, out = comm.symmetric((15,), torch.float32), torch.full((16,), -1.0)
        memory.local.copy_(torch.arange(15.0) + 100 * comm.rank)
        comm.barrier()
        comm.launch(rotate, (1,), memory.peers, out, comm.rank, WORLD_SIZE=comm.world_size, BLOCK=16)
        assert memory.table.tolist() == [p.data_ptr() for p in memory.peers]
        return out

    for rank, out in enumerate(tricomm.simulate(fn, 3)):
        assert torch.equal(out, torch.cat([torch.arange(15.0) + 100 * ((rank + 1) % 3), torch.tensor([-1.0])]))


def test_an_error_names_its_rank_and_line_and_the_others_see_a_dead_peer():
    seen = {}

    def fn(comm):
        if comm.rank == 1:
            raise ValueError("out of ideas")
        try:
            comm.barrier()
        except PeerDied as error:
            seen[comm.rank] = str(error)

    with pytest.raises(ValueError, match="rank 1: out of ideas") as caught:
        tricomm.simulate(fn, 3)
    assert any("rank 1" in note and "test_world.py:" in note for note in caught.value.__notes__)
    assert set(seen) == {0, 2} and all("rank 1" in text for text in seen.values())


def test_a_deadlock_is_found_without_a_timeout():
    began = time.monotonic()

    def fn(comm):
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(CollectiveTimeout, match="rank 1") as caught:
        tricomm.simulate(fn, 2)
    assert "waits at" in caught.value.__notes__[-1] and "rank 1 has returned" in caught.value.__notes__[-1]
    with pytest.raises(CollectiveTimeout, match=r"expected 5, found 0"):
        tricomm.simulate(lambda comm: comm.launch(k.waits, 1, words(comm).local, 5), 2)
    with pytest.raises(CollectiveTimeout, match="symmetric"):
        tricomm.simulate(lambda comm: comm.rank or comm.symmetric((1,), torch.int32), 2)
    assert time.monotonic() - began < 120, "the wait ended at its limit of 600 s only"


@pytest.mark.parametrize("how", ["sleep", "event", "queue"])
def test_waiting_outside_of_tricomm_is_ended_and_named(how):
    def fn(comm):
        if comm.rank == 1:
            {"sleep": lambda: time.sleep(60), "event": threading.Event().wait, "queue": queue.Queue().get}[how]()
        comm.barrier()

    with pytest.raises(InvalidArgument, match=r"rank 1 has not come back to tricomm for 0.5 s, at .*test_world.py:\d+"):
        tricomm.simulate(fn, 2, options=tricomm.Options(stall_timeout=0.5))


@triton.jit
def assembly(x_ptr):
    tl.store(x_ptr, tl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], dtype=tl.int32, is_pure=True, pack=1))


@pytest.mark.parametrize("run", [tricomm.simulate, tricomm.check], ids=["simulate", "check"])
def test_a_kernel_that_the_interpreter_cannot_run(run):
    def fn(comm):
        if comm.rank == 1:
            comm.launch(assembly, 1, torch.zeros(1, dtype=torch.int32))

    with pytest.raises(InvalidArgument, match="rank 1: kernel assembly cannot run") as caught:
        run(fn, 2)
    assert any("test_world.py:" in note for note in caught.value.__notes__)


def test_an_access_outside_is_an_error_and_no_crash():
    def fn(comm):
        comm.launch(k.outside, 1, words(comm).local, torch.zeros(16, dtype=torch.int64), 3, BLOCK=16)

    with pytest.raises(tricomm.TricommError, match=r"small_kernels.py:\d+: rank [01], block 0 reads .* past the end"):
        tricomm.simulate(fn, 2)


def test_ctrl_c_leaves_everything_usable():
    def fn(comm):
        comm.barrier()
        if comm.rank == 1:
            raise KeyboardInterrupt
        comm.barrier()

    with pytest.raises(KeyboardInterrupt):
        tricomm.simulate(fn, 2)
    assert patched() == []
    assert tricomm.simulate(lambda comm: comm.rank, 2) == [0, 1]


def test_in_another_thread_and_inside_another_one():
    def inner(comm):
        return comm.all_reduce(torch.ones(3)).tolist()

    results = []
    thread = threading.Thread(target=lambda: results.append(tricomm.simulate(inner, 2)))
    thread.start()
    results.append(tricomm.simulate(lambda comm: (comm.barrier(), tricomm.simulate(inner, 3))[1], 2))
    thread.join(60)
    assert [[2.0] * 3] * 2 in results and [[[3.0] * 3] * 3] * 2 in results


def test_results_outlive_the_ranks_and_a_late_call_is_refused():
    kept = []

    def fn(comm):
        memory = comm.symmetric((4,), torch.float32)
        memory.local.fill_(comm.rank + 1.0)
        kept.append(comm)
        return memory.local

    results = tricomm.simulate(fn, 2)
    assert [r.tolist() for r in results] == [[1.0] * 4, [2.0] * 4]
    with pytest.raises(tricomm.GroupAborted, match="closed"):
        kept[0].barrier()


def test_a_check_does_not_import_torchs_compiler():
    """torch would import it, for seconds, at the first operation under a mode whose method it has wrapped."""
    assert not hasattr(host_state._Watch.__torch_dispatch__, "__wrapped__")


@pytest.mark.parametrize("compiled", [None, "sm_90"])
def test_large_memory_is_freed_with_its_execution(monkeypatch, compiled):
    """Tables of accesses take many times the bytes of an arena, and a campaign has hundreds of executions."""
    where, name = (detector, "Shadow") if compiled is None else (thread_detector, "ThreadShadow")
    alive, counts = weakref.WeakSet(), []

    class Counted(getattr(where, name)):
        def __init__(self, *args):
            super().__init__(*args)
            alive.add(self)
            counts.append(len(alive))

    monkeypatch.setattr(where, name, Counted)
    gc.disable()
    try:
        assert not tricomm.check(
            lambda comm: comm.all_reduce(torch.ones(64)), 2, schedules=5, compiled=compiled
        ).findings
        assert not alive and len(counts) > max(counts) > 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float64, None), (torch.float64, "sm_90")],
    ids=str,
)
def test_the_quads_of_a_cube_mesh_hold_one_nan(dtype, compiled):
    """Each quad adds its sum to the other's, so the sum of two NaNs must not depend on their order."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]

    def fn(comm):
        x = torch.zeros(3, dtype=dtype)
        if comm.rank in (0, 6):
            x[:2] = torch.nan
            x.view(bits)[0] += comm.rank  # a payload
            x.view(bits)[1] ^= torch.iinfo(bits).min * (comm.rank == 6)  # a sign
        return comm.all_reduce(x, algorithm="hybrid_cube_mesh", protocol="ll").view(bits)

    first, *others = tricomm.simulate(fn, 8, compiled=compiled)
    assert all(torch.equal(first, other) for other in others)
    assert first.view(dtype).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("operation", ["+", "-", "*", "/", "min", "max"])
def test_arithmetic_has_one_nan_pattern(operation, dtype):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    one, other = (torch.full((4,), torch.nan, dtype=dtype) for _ in range(2))
    one.view(bits)[:] += torch.arange(4)
    other.view(bits)[:] ^= torch.iinfo(bits).min

    def fn(comm):
        y = torch.zeros(2, 4, dtype=dtype)
        comm.launch(k.calculate, 1, one, other, y[0], OPERATION=operation)
        comm.launch(k.calculate, 1, other, one, y[1], OPERATION=operation)
        return y.view(bits)

    (y,) = tricomm.simulate(fn, 1)
    assert torch.equal(y, torch.full_like(y, {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FF8 << 48}[dtype.itemsize]))
