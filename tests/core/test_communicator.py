"""The communicator between real processes: results, argument errors, life cycle, two groups, user kernels."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import SMALL, communicator, leftovers, more_than
from tests.core.bodies.exact import anything, outcome
from tests.store.store_ranks import succeed
from tricomm.kernels.collectives import registry
from tricomm.options import Tuning
from tricomm.policy import backend_choice

KERNELS = [k for k in registry.KERNELS if not k.needs_cube and k.collective != "barrier"]


def every_case(rank, world_size, tell, url, cases):
    with communicator(rank, world_size, url, arena_bytes=256 << 10, _tuning=Tuning(blocks=2, tile=32)) as comm:
        return [case for number, case in enumerate(cases) if not outcome(comm, case, number)]


@pytest.mark.parametrize("world_size", [1, 2, 3, *[pytest.param(n, marks=pytest.mark.exhaustive) for n in (4, 5, 8)]])
def test_every_kernel(world_size, url):
    """Between processes, back to back; tests/core/test_collectives.py has every type, operation and size."""
    draw = random.Random(world_size)
    cases = [anything(draw, kernel) for kernel in KERNELS]
    assert ranks.run(world_size, every_case, url, cases, timeout=200) == [[]] * world_size


@ranks.each(2, 4)
def test_a_refused_call_consumes_nothing_and_the_group_still_works(rank, world_size, tell, url):
    refused = []
    with communicator(rank, world_size, url) as comm:
        for seed, call in enumerate(
            [
                lambda: comm.all_reduce(torch.ones(3, dtype=torch.uint16)),
                lambda: comm.all_reduce(torch.ones(3), op="median"),
                lambda: comm.all_reduce(torch.ones(3), out=torch.ones(4)),
                lambda: comm.all_reduce(torch.ones(1).expand(4)),
                lambda: comm.all_reduce(torch.ones(3), algorithm="ring"),
                lambda: comm.all_gather(torch.ones(3), out=torch.ones(3)),
                lambda: comm.launch(print, (1,)),
                lambda: comm.explain("all_reduce", -1),
            ]
        ):
            if rank == seed % world_size:
                try:
                    call()
                except tricomm.InvalidArgument as error:
                    refused.append(str(error))
            x = torch.full((5,), float(rank + seed))
            comm.all_reduce(x)
            if not torch.equal(x, torch.full((5,), float(sum(r + seed for r in range(world_size))))):
                return f"wrong after refusal {seed}"
        before = comm._launcher.sequence
        comm.all_reduce(torch.empty(0))
        assert comm.all_gather(torch.empty(0, 3)).shape == (0, 3)
        if comm._launcher.sequence != before:
            return "a call of zero elements consumed a sequence number"
        comm.barrier()
    return len(refused)


def one_life(rank, world_size, url):
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
    x = torch.ones(4)
    comm.all_reduce(x)
    assert x.tolist() == [float(world_size)] * 4
    comm.barrier()
    comm.close()
    comm.close()
    for use in (lambda: comm.all_reduce(x), comm.barrier, comm.synchronize, lambda: comm.symmetric((4,), x.dtype)):
        try:
            use()
        except tricomm.GroupAborted as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("a closed communicator was usable")


@ranks.each(2, {})
def test_close_use_after_close_and_again_over_the_same_store(rank, world_size, tell, url):
    """Close twice, use after close, make it again over the same store; no resources are left."""
    before = leftovers()
    for _ in range(5):
        one_life(rank, world_size, url)
    return more_than(before)


def forked(rank, world_size, tell, url):
    """A child's copy refuses calls, also one that the parent has prepared, and while another thread of the parent holds
    the call lock, which is never released in the child. The parent does not notice the child's exit."""
    with communicator(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(2))
        taken, forked = threading.Event(), threading.Event()

        def take():
            with comm._launcher.held():
                taken.set()
                forked.wait(20)

        thread = threading.Thread(target=take)
        thread.start()
        taken.wait(20)
        child = os.fork()
        if child != 0:
            forked.set()
            thread.join()
        else:
            try:
                comm.all_reduce(torch.ones(2))
            except tricomm.InvalidArgument as error:
                comm.close()
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
        _, status = os.waitpid(child, 0)
        for _ in range(5):
            x = torch.ones(3)
            comm.all_reduce(x)
        return os.waitstatus_to_exitcode(status), x.tolist()


def test_a_forked_copy_refuses_calls_and_the_parent_still_works(url):
    for code, x in ranks.run(2, forked, url):
        assert code == 7 and x == [2.0, 2.0, 2.0]


def bad_launches(rank, world_size, tell, url):
    from tests.core.bodies.user_kernel import rotate, waits_for_ever

    refused = []
    with communicator(rank, world_size, url, timeout=4.0) as comm:
        w = comm.symmetric((3, 5), torch.float32)
        out = torch.zeros(15)
        constexprs = {"WORLD_SIZE": world_size, "BLOCK": 16}
        for args, more, grid in [
            ((w.peers, out), constexprs, (1,)),
            ((w.peers, out, comm.rank, 7), constexprs, (1,)),
            ((w.peers, out, comm.rank), {"WORLD_SIZE": world_size}, (1,)),
            ((w.peers, object(), comm.rank), constexprs, (1,)),
            ((w.peers, out, comm.rank), constexprs, (1, 1, 1, 1)),
            ((w.peers, out, comm.rank), constexprs, (0,)),
            ((w.peers, out, comm.rank), constexprs, "x"),
        ]:
            try:
                comm.launch(rotate, grid, *args, **more)
            except tricomm.InvalidArgument as error:
                refused.append(str(error))
        for grid in (1, (1,), lambda meta: (meta["BLOCK"] // 16,)):
            comm.launch(rotate, grid, w.peers, out, comm.rank, **constexprs, num_warps=4)
        comm.all_reduce(out)
        for bad in [
            (5, torch.float32),
            ((2.7,), torch.float32),
            ((3,), torch.qint8),
            ((3,), "float32"),
            ((), torch.int8),
        ]:
            try:
                comm.symmetric(*bad)
            except tricomm.InvalidArgument:
                refused.append("symmetric")
        comm.barrier()
        began = time.monotonic()
        try:
            comm.launch(waits_for_ever, (1,), comm.group_table, w.table)
        except tricomm.CollectiveTimeout:
            return len(refused), time.monotonic() - began
        except tricomm.TricommError:  # the other rank was first
            return len(refused), time.monotonic() - began


def test_launches_that_do_not_fit_are_refused_and_those_that_wait_are_bounded(url):
    for refused, seconds in ranks.run(2, bad_launches, url):
        assert refused == 12 and seconds < 6.0


@ranks.each(2, "fine")
def test_many_launches_are_not_taken_for_one_that_hangs(rank, world_size, tell, url):
    from tests.core.bodies.user_kernel import rotate

    with communicator(rank, world_size, url, timeout=1.0) as comm:
        w = comm.symmetric((3, 5), torch.float32)
        out, end = torch.zeros(15), time.monotonic() + 2.0
        while time.monotonic() < end:
            comm.launch(rotate, (1,), w.peers, out, comm.rank, WORLD_SIZE=world_size, BLOCK=16)
        return "fine"


@ranks.each(2, (0, 30))
def test_threads_that_share_a_communicator_take_turns(rank, world_size, tell, url):
    wrong = []
    with communicator(rank, world_size, url) as comm:

        def use(_):
            for _ in range(10):
                x = torch.ones(100)
                comm.all_reduce(x, async_op=True)  # the handle is dropped
                wrong.extend([1] * int((x != world_size).sum()))

        succeed(3, use)
        return len(wrong), comm._launcher.sequence


def memory(rank, world_size, tell, url):
    from tests.core.bodies.user_kernel import rotate

    with communicator(rank, world_size, url) as comm:
        w = comm.symmetric((3, 5), torch.float32)
        if w.local.abs().sum() != 0 or w.local.shape != (3, 5) or len(w.peers) != world_size:
            return "not zeroed, or of another shape"
        w.local.fill_(float(rank))
        comm.barrier()
        seen = [p[0, 0].item() for p in w.peers]
        comm.barrier()
        out = torch.zeros(15)
        comm.launch(rotate, (1,), w.peers, out, comm.rank, WORLD_SIZE=world_size, BLOCK=16)
        table = w.table.tolist()
        comm.barrier()
        w.local.fill_(1.0)
        comm.all_reduce(w)
        reduced = w.local.sum().item()
        refused = None
        try:
            comm.symmetric((rank + 1,), torch.float32)
        except tricomm.InvalidArgument as error:
            refused = str(error)
        w.close()
        return seen, out.tolist(), len(set(table)), reduced, refused


def test_symmetric_memory_and_a_users_kernel(url):
    for rank, (seen, out, addresses, reduced, refused) in enumerate(ranks.run(3, memory, url)):
        assert seen == [0.0, 1.0, 2.0]
        assert out == [float((rank + 1) % 3)] * 15
        assert addresses == 3 and reduced == 45.0
        assert refused is not None and "rank 0 has " in refused and "rank 1 has " in refused


def splits(rank, world_size, tell, url):
    """Sub-groups with ranks in any order, side by side and nested; and invalid lists of ranks."""
    result, refused = [], []
    with communicator(rank, world_size, url) as comm:
        for bad in ([], [0, 0], [3], [True, 0], "01", 1, [rank]):
            try:
                comm.split(bad)
            except tricomm.InvalidArgument as error:
                refused.append("split: " in str(error))
        halves = [comm.split([2, 0]), comm.split([1])]
        whole = comm.split([2, 1, 0])
        for sub in (*halves, whole):
            if sub is not None:
                x = torch.tensor([10.0**rank, sub.rank])
                result.append((sub.rank, sub.world_size, sub.all_gather(x).tolist()))
        inner = whole.split([0, 2])
        if inner is not None:
            result.append(inner.all_reduce(torch.tensor([float(rank)])).tolist())
        comm.barrier()
        for sub in (inner, whole, *halves):
            if sub is not None:
                sub.close()
        result.append(comm.all_reduce(torch.ones(1)).tolist())
    return refused, result


def test_split(url):
    refused, result = zip(*ranks.run(3, splits, url), strict=True)
    assert all(sum(each) == len(each) == 7 for each in refused)
    pair, three = [100.0, 0.0, 1.0, 1.0], [100.0, 0.0, 10.0, 1.0, 1.0, 2.0]
    assert result[0] == [(1, 2, pair), (2, 3, three), [2.0], [3.0]]
    assert result[1] == [(0, 1, [10.0, 0.0]), (1, 3, three), [3.0]]
    assert result[2] == [(0, 2, pair), (0, 3, three), [2.0], [3.0]]


def test_split_of_simulated_ranks_is_refused():
    with pytest.raises(tricomm.InvalidArgument, match="no store to meet over"):
        tricomm.simulate(lambda comm: comm.split([0]), 2)


def test_nothing_of_a_closed_communicator_waits_for_the_garbage_collector():
    """Otherwise its memory stays mapped until then: close() breaks the reference cycles between its parts."""
    gc.collect()
    gc.disable()
    try:
        comm = tricomm.Communicator(HashStore(), 0, 1, "cpu", options=tricomm.Options(arena_bytes=256 * 1024))
        comm.all_reduce(torch.ones(3))
        comm.barrier()
        parts = [weakref.ref(part) for part in (comm, comm._group, comm._faults, comm._planner, comm._messages)]
        comm.close()
        del comm
        assert [part() for part in parts] == [None] * 5
    finally:
        gc.enable()


@pytest.mark.parametrize("without", [None, "beside_compute", "batch_invariant"])
def test_calls_that_may_use_nvls_are_routed_as_such(without, monkeypatch):
    seen, decide = [], backend_choice.decide

    def spied(facts, *call):
        seen.append(facts.switch)
        return decide(facts, *call)

    monkeypatch.setattr(backend_choice, "decide", spied)
    options = tricomm.Options(arena_bytes=256 * 1024, **({without: True} if without else {}))
    with tricomm.Communicator(HashStore(), 0, 1, "cpu", options=options) as comm:
        assert comm._internal.planner.router.facts.switch is (without is None), "the interpreter needs no switch"
        comm.all_reduce(torch.ones(64))
    assert seen and set(seen) == {without is None}
