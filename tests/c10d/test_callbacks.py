"""Callbacks of futures: their calls' order does not depend on time, futures behave like torch's, errors of one rank."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.c10d.bodies import callback_bodies as bodies
from tests.c10d.bodies.groups import ROUTES, default_group, of, same
from tests.c10d.test_call_queue import blocked
from tricomm import threads
from tricomm.c10d.call_queue import CallQueue
from tricomm.errors import GroupAborted, InvalidArgument, ResourceError

both_routes = pytest.mark.parametrize("route", ROUTES)


@both_routes
@pytest.mark.parametrize(("slow", "late"), [(True, False), (False, True)], ids=["slow", "late"])
def test_calls_of_callbacks_meet_the_same_calls(route, slow, late, url):
    assert ranks.run(2, bodies.slow_or_late, url, route, slow, late) == [[]] * 2


def test_without_their_places_late_callbacks_meet_others(url):
    wrong = ranks.run(2, bodies.slow_or_late, url, "gloo", False, True, True)
    assert all(wrong)


@both_routes
def test_a_callback_of_one_rank_alone_is_a_mismatch_and_no_sum(route, url):
    (x, y, error), (*others, told) = ranks.run(2, bodies.one_sided, url, route)
    assert [x, y] == others == [[2.0] * 4, [6.0] * 4]
    assert error.startswith("CollectiveMismatch") and "call 1/1/1" in error and "rank(s) [1] have not made" in error
    assert told.startswith("CollectiveMismatch") and "gave the group up" in told


@both_routes
def test_hooks_train_as_over_gloo_if_a_rank_is_slow(route, url):
    assert ranks.run(2, bodies.hooks, url, route, 3, timeout=200) == [[]] * 2


@pytest.mark.soak
@both_routes
def test_hooks_train_as_over_gloo_for_long(route, url):
    assert ranks.run(2, bodies.hooks, url, route, 100, timeout=3600) == [[]] * 2


@both_routes
@ranks.each(2, [[2.0] * 4, [4.0] * 4])
def test_groups_in_threads_do_not_wait_crosswise(rank, world_size, tell, url, route):
    with default_group(rank, world_size, url, route, timeout=20.0):
        groups = [dist.group.WORLD, dist.new_group()]
        results = [torch.ones(4), torch.full((4,), 2.0)]
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4), group=groups[1])

        def call(number):
            time.sleep(0.4 * ((number + rank) % 2))
            dist.all_reduce(results[number], group=groups[number])

        thread = threading.Thread(target=call, args=(1,))
        thread.start()
        call(0)
        thread.join()
        return [x.tolist() for x in results]


@both_routes
@ranks.each(2, [])
def test_tensors_of_inference_mode(rank, world_size, tell, url, route):
    wrong = []
    with default_group(rank, world_size, url, route):
        with torch.inference_mode():
            xs = [of(rank, (5,), call=call) for call in range(6)]
            parts = of(rank, (2 * world_size,), call=9)
            dist.all_reduce(xs[0])
            dist.all_reduce(xs[1].view(5, 1)[:, 0], async_op=True).wait()
        dist.all_reduce(xs[2])
        dist.reduce(xs[3], 0)
        dist.broadcast(xs[4], 1)
        dist.all_reduce(spread := xs[5][::2], async_op=True).get_future().then(lambda f: f.value()).wait()
        out = torch.zeros(2)
        dist.reduce_scatter_tensor(out, parts)
        for call in (0, 1, 2):
            want = sum(of(r, (5,), call=call) for r in range(world_size))
            wrong += [] if same(xs[call].clone(), want) else [call]
        want = sum(of(r, (5,), call=3) for r in range(world_size)) if rank == 0 else of(rank, (5,), call=3)
        wrong += [] if same(xs[3].clone(), want) or rank else ["reduce"]
        wrong += [] if same(xs[4].clone(), of(1, (5,), call=4)) else ["broadcast"]
        wrong += [] if same(spread.clone(), sum(of(r, (5,), call=5) for r in range(world_size))[::2]) else ["gaps"]
        want = sum(of(r, (2 * world_size,), call=9) for r in range(world_size))[2 * rank : 2 * rank + 2]
        wrong += [] if same(out, want) and not out.is_inference() else ["reduce_scatter"]
        return wrong


def test_an_error_before_anything_is_sent_reaches_all_ranks_and_the_group_still_works(url):
    (told, soon, after), (error, also_soon, same) = ranks.run(2, bodies.of_one_rank, url, "gloo", "before")
    assert error == "RuntimeError: no room here" and soon and also_soon
    assert told.startswith("CollectiveMismatch") and "a rank cannot make the call" in told and "no room here" in told
    assert after == same == [2.0] * 3


def test_an_error_after_the_last_message_is_raised_on_that_rank_only(url):
    (none, soon, after), (error, also_soon, same) = ranks.run(2, bodies.of_one_rank, url, "gloo", "after")
    assert (none, error) == ("none", "RuntimeError: no room here") and soon and also_soon
    assert after == same == [2.0] * 3


def test_an_error_in_the_middle_ends_the_call_everywhere(url):
    outcomes = ranks.run(2, bodies.of_one_rank, url, "gloo", "during")
    assert all(error.startswith("GroupAborted") and "no room here" in error and soon for error, soon, _ in outcomes)
    assert [after for *_, after in outcomes] == ["GroupAborted"] * 2


def test_the_tensors_of_a_call_are_freed_without_a_collection_if_its_future_was_used(calls):
    x = torch.ones(3)
    gone = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        work = calls.run(lambda turn: None, "", [x], True)
        work.get_future().then(lambda f: f.value()[0] + 1).wait()
        del x, work
        end = time.monotonic() + 5
        while gone() is not None and time.monotonic() < end:
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()


def test_a_callback_that_ends_its_thread_lets_later_ones_run(calls):
    gate = threading.Event()
    future = blocked(calls, gate).get_future()
    ended = future.then(lambda f: sys.exit("from a callback"))
    after = ended.then(lambda f: 5)
    gate.set()
    assert after.wait() == 5
    with pytest.raises(SystemExit, match="from a callback"):
        ended.wait()


def test_collect_all_refuses_the_arguments_that_torch_refuses(calls):
    future = calls.run(lambda turn: None, "", [], True).get_future()
    for wrong in ([future, None], [future, 5], None):
        with pytest.raises((TypeError, RuntimeError)):
            torch.futures.collect_all(wrong)
    assert torch.futures.wait_all([future, future]) == [[], []] and torch.futures.collect_all([]).wait() == []
    assert torch.futures.wait_all(f for f in (future, future)) == [[], []]


def test_set_exception_refuses_values_that_are_not_exceptions(calls):
    future = blocked(calls, gate := threading.Event()).get_future()
    with pytest.raises(InvalidArgument, match="found str"):
        future.set_exception("no")
    assert not future.done()
    gate.set()
    assert future.wait() == []


def test_a_forked_process_does_not_wait_for_its_parents_calls(calls):
    gate = threading.Event()
    running, queued = blocked(calls, gate), calls.run(lambda turn: None, "", [], True)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        ended = [_error(work.wait) for work in (running, queued)] + [_error(running.get_future().wait)]
        os._exit(0 if ended == [GroupAborted] * 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.set()
    assert running.wait() and queued.wait()


def _error(wait):
    try:
        wait()
    except Exception as error:
        return type(error)


def test_if_no_thread_can_start_calls_of_two_threads_are_refused(calls, monkeypatch):
    def no_thread(*_):
        """Another thread queues a call while this one's is refused."""
        other = threading.Thread(target=lambda: later.append(named(True)))
        other.start()
        other.join()
        raise ResourceError("no more threads")

    def named(async_op):
        return calls.run(lambda turn: names.append(str(turn)), "", [], async_op)

    names, later = [], []
    monkeypatch.setattr("tricomm.threads._helpers", [])
    with monkeypatch.context() as patch:
        patch.setattr(threads, "start", no_thread)
        with pytest.raises(ResourceError):
            named(False)
    with pytest.raises(ResourceError):
        later[0].wait(timedelta(seconds=20))
    named(False)
    assert names == ["1"]


def test_a_callback_may_call_another_group_while_a_thread_makes_groups(calls):
    ends, interval = time.monotonic() + 2, sys.getswitchinterval()
    other, kept = CallQueue("other"), [CallQueue("kept") for _ in range(300)]
    sys.setswitchinterval(1e-6)

    def make():
        while time.monotonic() < ends:
            CallQueue("made")

    thread = threading.Thread(target=make)
    thread.start()
    try:
        while time.monotonic() < ends:
            assert calls.name_for(other) == "@test" and len(kept) == 300
    finally:
        sys.setswitchinterval(interval)
        thread.join()
        other.close()
