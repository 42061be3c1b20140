"""Work and Future as c10d defines them, order between groups and threads, faults, bad input."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import ROUTES, default_group, of, poisoned, refused, same
from tricomm.c10d import call_futures, group_calls
from tricomm.c10d.dispatch import Dispatcher
from tricomm.c10d.work_handles import FinishedWork
from tricomm.core.watch.monitor import Monitor
from tricomm.errors import GroupAborted


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(2, [], timeout=120)
def test_handles_and_futures(rank, world_size, tell, url, route):
    """async_op: wait, is_completed, exception, futures with then, nested calls in a callback, dropped handles."""
    wrong = []
    with default_group(rank, world_size, url, route):
        for call in range(20):
            x = of(rank, (50,), call=call)
            total = sum(of(r, (50,), call=call) for r in range(world_size))
            work = dist.all_reduce(x, async_op=True)
            seen = []
            then = work.get_future().then(lambda f, seen=seen: seen.append(f.value()[0].clone()) or 7)
            work.wait()
            wrong += [] if same(x, total) else ["value"]
            wrong += [] if work.is_completed() and work.is_success() and work.exception() is None else ["state"]
            wrong += [] if then.wait() == 7 and same(seen[0], total) else ["then"]

        def another(future):
            y = future.value()[0] * 2
            return dist.all_reduce(y, async_op=True).get_future().wait()[0]

        x = of(rank, (4,))
        nested = dist.all_reduce(x, async_op=True).get_future().then(another).wait()
        want = sum(of(r, (4,)) for r in range(world_size)) * 2 * world_size
        wrong += [] if same(nested, want) else ["nested"]
        for call in range(50):  # neither the handle nor the tensor is kept
            dist.all_reduce(of(rank, (100,), call=call), async_op=True)
        gc.collect()
        outs = [poisoned((3,)) for _ in range(world_size)]
        works = [dist.all_gather(outs, of(rank, (3,)), async_op=True), dist.barrier(async_op=True)]
        for work in reversed(works):
            work.wait()
        wrong += [] if all(same(o, of(r, (3,))) for r, o in enumerate(outs)) else ["waited for in reverse"]
    return wrong


@ranks.each(2, (False, [2.0] * 3))
def test_an_asynchronous_call_does_not_block(rank, world_size, tell, url):
    """With async_op, a call returns before the other ranks have called, and wait(timeout) is bounded."""
    with default_group(rank, world_size, url) as world:
        dist.barrier()
        if rank == 0:
            x = torch.ones(3)
            work = dist.all_reduce(x, async_op=True)
            early = work.is_completed()
            refused(lambda: work.wait(timedelta(seconds=0.2)), "timeout after 0.2 s", kind=tricomm.CollectiveTimeout)
            world.send([torch.ones(1)], 1, 3).wait()  # only now does the other rank call
            work.wait()
            return early, x.tolist()
        world.recv([torch.ones(1)], 0, 3).wait()
        x = torch.ones(3)
        dist.all_reduce(x)
        return False, x.tolist()


def fire_and_forget(rank, world_size, tell, url, route, refusing=False):
    """Destroy a group, three calls of which are still queued, and read their results."""

    def refuse(dispatcher, what):
        if dispatcher._closed:
            raise GroupAborted("destroyed")

    if refusing:
        Dispatcher.check_not_lost = refuse
    with default_group(rank, world_size, url, route):
        group = dist.new_group()
        dist.barrier(group)
        xs = [torch.full((100_000,), rank + 1.0) for _ in range(3)]
        for x in xs:
            dist.all_reduce(x, group=group, async_op=True)
        dist.destroy_process_group(group)
        return [x.unique().tolist() for x in xs]


@pytest.mark.parametrize("route", ROUTES)
def test_a_destroyed_group_runs_the_calls_that_were_made_before(route, url):
    assert ranks.run(2, fire_and_forget, url, route) == [[[3.0]] * 3] * 2


def test_if_a_destroyed_group_refused_queued_calls_their_results_would_be_missing(url):
    assert [[3.0]] * 3 not in ranks.run(2, fire_and_forget, url, "gloo", True)


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(2, [2.0, 2.0])
def test_a_wait_for_no_timedelta_is_refused_and_the_group_still_works(rank, world_size, tell, url, route):
    with default_group(rank, world_size, url, route) as world:
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        refused(lambda: work.wait(5), "timeout=5: a datetime.timedelta is needed")
        work.wait(timedelta(seconds=30))
        refused(lambda: world.monitored_barrier("soon"), "timeout='soon'")
        dist.barrier()
        return x.tolist()


@ranks.each(3, (3.0, 9.0))
def test_overlapping_groups_in_opposite_orders(rank, world_size, tell, url):
    with default_group(rank, world_size, url):
        a, b = dist.new_group([0, 1]), dist.new_group(list(range(world_size)))
        x, y = torch.ones(3) * (rank + 1), torch.ones(5) * (rank + 2)
        order = [(a, x), (b, y)] if rank % 2 else [(b, y), (a, x)]
        works = [dist.all_reduce(t, group=g, async_op=True) for g, t in order]
        for work in works:
            if work is not None:
                work.wait()
        return (x[0].item() if rank < 2 else 3.0), y[0].item()


def mismatches(rank, world_size, tell, url, route):
    said = []
    odd = rank == world_size - 1
    with default_group(rank, world_size, url, route):
        for call in (
            lambda: dist.all_reduce(torch.ones(30000 + 100000 * odd)),
            lambda: dist.all_reduce(torch.ones(8, dtype=torch.int32 if odd else torch.float32)),
            lambda: dist.all_reduce(torch.ones(8), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
            lambda: dist.broadcast(torch.ones(8), 1 if odd else 0),
            lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(8)),
            lambda: dist.all_gather([torch.ones(3 + odd)] * world_size, torch.ones(3 + odd)),
            lambda: dist.all_to_all_single(
                torch.ones(2 * world_size + odd),
                torch.ones(2 * world_size),
                [2] * (world_size - 1) + [2 + odd],
                [2] * world_size,
            ),
        ):
            said.append(refused(call, "rank", "call", kind=tricomm.CollectiveMismatch))
            x = torch.ones(4)
            dist.all_reduce(x)
            assert x[0] == world_size
    return said


@pytest.mark.parametrize("route", ROUTES)
def test_different_calls_are_named_on_every_rank_and_the_group_still_works(route, url):
    for said in ranks.run(3, mismatches, url, route, timeout=120):
        assert "130000" in said[0] and "30000" in said[0] and "[2]" in said[0]
        assert "int32" in said[1] and "max" in said[2] and "root=1" in said[3] and "barrier" in said[4]
        assert "rank 2 expects" not in said[6] and "sends 2 elements to rank 2, which expects 3" in said[6]


class Inline:
    """Stands for the group's stream on a GPU."""

    def run(self, action, batch, timeout):
        action()
        return FinishedWork([])


def another_way(rank, world_size, tell, url, first, compared=True):
    """Rank 0's call runs on a kernel, rank 1's on NCCL (here a wait); send the error that each of them gets.

    As on a GPU, where nothing is compared before a call; `first`: it is the group's first call.
    """
    os.environ["TRICOMM_CHECK"] = "0"
    if not compared:
        Monitor.diverging = lambda monitor: False
    said, aborted = [], threading.Event()
    with default_group(rank, world_size, url, "kernels", timeout=60.0 if compared else 3.0) as world:
        world._backends.native["cuda"] = SimpleNamespace(abort=aborted.set, shutdown=lambda: None)
        engine = world._dispatcher
        engine._streams[torch.device("cpu")] = Inline()
        if not first:
            dist.all_reduce(torch.ones(4))
        began = time.monotonic()
        for dtype in (torch.complex32 if rank else torch.float32, torch.float32):
            call = group_calls.in_place("all_reduce", torch.ones(4, dtype=dtype), "sum")
            call.async_op = False
            try:
                engine.on_cuda([call], lambda: said.append("left" if aborted.wait(30) else "stuck"))
            except tricomm.TricommError as error:
                said.append((type(error).__name__, str(error)))
        del world._backends.native["cuda"]
        return said, time.monotonic() - began


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later"])
def test_one_rank_in_a_kernel_and_one_in_nccl_are_named_at_once(first, url):
    (kernel, seconds), (nccl, others) = ranks.run(2, another_way, url, first)
    assert seconds < 10 and others < 10
    assert nccl[0] == "left"  # released by the abort
    for kind, text in [kernel[0], kernel[1], nccl[1]]:
        assert kind == "CollectiveMismatch"
        assert "dtype=float32" in text and "dtype=complex32" in text and "make the same call" in text


def refused_by_nccl(rank, world_size, tell, url):
    """NCCL refuses a call of rank 0, which the other rank does not see; the corrected one joins it."""
    os.environ["TRICOMM_CHECK"] = "0"
    said = []

    def refuses():
        said.append("refused")
        raise RuntimeError("tensors must be contiguous")

    def native():
        said.append("native")

    with default_group(rank, world_size, url, "kernels") as world:
        engine = world._dispatcher
        engine._streams[torch.device("cpu")] = Inline()

        def call(dtype, run):
            made = group_calls.in_place("all_reduce", torch.ones(4, dtype=dtype), "sum")
            made.async_op = False
            engine.on_cuda([made], run)
            return made.x

        if rank == 0:
            refused(lambda: call(torch.complex32, refuses), "contiguous", kind=RuntimeError)
        call(torch.complex32, native)
        time.sleep(0.5 * rank)  # meanwhile the other rank compares calls in its kernel
        said.append(call(torch.float32, None)[0].item())
    return said


def test_a_call_that_nccl_refuses_on_one_rank_consumes_nothing(url):
    assert ranks.run(2, refused_by_nccl, url) == [["refused", "native", 2.0], ["native", 2.0]]


def test_without_the_comparison_the_kernel_waits_until_the_timeout(url):
    (kernel, seconds), _ = ranks.run(2, another_way, url, False, False)
    assert kernel[0][0] == "CollectiveTimeout" and seconds > 2


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(2, 11, timeout=120)
def test_bad_input_is_refused_and_the_group_still_works(rank, world_size, tell, url, route):
    n = world_size
    ones = torch.ones
    with default_group(rank, n, url, route) as world:
        cases = [
            (lambda: dist.all_gather([ones(3)] * (n + 1), ones(3)), "list of", "one per rank"),
            (lambda: dist.all_gather_into_tensor(ones(3 * n + 1), ones(3)), "elements", str(3 * n)),
            (lambda: world.all_gather_single(ones(3 * n), ones(3, dtype=torch.int32)), "float32", "int32"),
            (lambda: dist.reduce_scatter_tensor(ones(3), ones(3 * n - 1)), "elements"),
            (lambda: dist.scatter(ones(3), [ones(2)] * n, src=rank), "scatter", "2 elements"),
            (lambda: dist.all_to_all_single(ones(2 * n + 1), ones(2 * n)), "evenly", "give splits"),
            (lambda: dist.all_reduce(ones(3).bool(), dist.ReduceOp.AVG), "avg of bool"),
            (lambda: dist.all_reduce(torch.ones(3, device="meta")), "meta"),
            (lambda: dist.broadcast(torch.eye(3).to_sparse(), 0), "dense", "to_dense"),
            (lambda: world.broadcast([ones(3)], n), f"0..{n - 1}"),
            (lambda: dist.send(ones(3, 4).t(), (rank + 1) % n), "contiguous"),
        ]
        for number, (call, *words) in enumerate(cases):
            if rank == number % n:
                refused(call, *words)
            x = of(rank, (4,), call=number)
            dist.all_reduce(x)
            assert same(x, sum(of(r, (4,), call=number) for r in range(n)))
    refused(lambda: world.allreduce([ones(3)]), "destroyed", "new one", kind=tricomm.GroupAborted)
    refused(lambda: world.send([ones(3)], 0, 0), "destroyed", kind=tricomm.GroupAborted)
    return len(cases)


def memory_of_a_failed_wait(calls, backward, monkeypatch):
    """A tensor of the call that failed, and one of the function that waited, referred to weakly."""
    monkeypatch.setattr("tricomm.c10d.work_handles.in_backward", lambda: backward)
    monkeypatch.setattr("tricomm.c10d.work_handles._called_by_autograd", lambda: backward)
    kept = []

    def fails(turn):
        inside = torch.ones(3)
        kept.append(weakref.ref(inside))
        raise GroupAborted(f"no: {inside.numel()}")

    def waits():
        waiting = torch.ones(3)
        kept.append(weakref.ref(waiting))
        work = calls.run(fails, "", [], True)
        future = work.get_future()
        for wait in (future.wait, future.value, work.wait):
            with pytest.raises((GroupAborted, RuntimeError), match="no: 3"):
                wait()

    waits()
    return kept


@pytest.mark.parametrize("backward", [False, True])
def test_a_failed_future_keeps_no_frames(calls, backward, monkeypatch):
    kept = memory_of_a_failed_wait(calls, backward, monkeypatch)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_with_the_error_itself_it_would_keep_them(calls, monkeypatch):
    monkeypatch.setattr(call_futures, "_without_frames", lambda error: error)
    kept = memory_of_a_failed_wait(calls, False, monkeypatch)
    gc.collect()
    assert None not in [reference() for reference in kept]


def test_an_error_that_cannot_be_copied_is_raised_all_the_same(calls):
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} {two}")

    future = calls.run(lambda turn: None, "", [], True).get_future()
    child = future.then(lambda f: (_ for _ in ()).throw(Odd("not", "copied")))
    for _ in range(2):
        with pytest.raises(Odd, match="not copied"):
            child.wait()
