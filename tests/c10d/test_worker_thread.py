"""The order of a group's calls: callbacks belong to their call, and what they call comes before what waits."""

import gc
import signal
import threading
import time
import weakref

import pytest
import torch

from tricomm.c10d import worker_thread as module
from tricomm.c10d.work_handles import PendingWork
from tricomm.c10d.worker_thread import CallQueue
from tricomm.errors import GroupAborted


@pytest.fixture
def calls():
    made = CallQueue("test")
    yield made
    made.close()


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "tricomm-worker"]


def test_what_a_callback_calls_comes_before_what_waits(calls):
    order, gate = [], threading.Event()
    first = calls.run(lambda: (gate.wait(20), order.append("first")), "", [], True)

    def nested(future):
        work = calls.run(lambda: order.append("nested"), "", [], True)
        work.get_future().then(lambda f: calls.run(lambda: order.append("deeper"), "", [], False)).wait()

    first.get_future().then(nested)
    works = [calls.run(lambda: order.append("second"), "", [], True)]
    gate.set()
    calls.run(lambda: order.append("third"), "", [], False)
    for work in works:
        work.wait()
    assert order == ["first", "nested", "deeper", "second", "third"]


def test_a_callback_that_is_attached_late_comes_at_once_too(calls):
    order = []
    first = calls.run(lambda: order.append("first"), "", [], True)
    first.wait()
    time.sleep(0.05)
    first.get_future().then(lambda f: calls.run(lambda: order.append("nested"), "", [], False))
    calls.run(lambda: order.append("second"), "", [], False)
    assert order == ["first", "nested", "second"]


def waits_for_a_later_one(calls):
    """A callback that waits for a call that waits behind it: seconds until all is over."""
    gate, later = threading.Event(), []
    first = calls.run(lambda: gate.wait(20), "", [], True)
    done = first.get_future().then(lambda f: later[0].get_future().wait())
    later.append(calls.run(lambda: None, "", [], True))
    began = time.monotonic()
    gate.set()
    return began, done, later[0]


def test_a_callback_that_waits_for_a_later_call_is_left_behind(calls, monkeypatch):
    monkeypatch.setattr(module, "_CALLBACK_SECONDS", 0.2)
    for _ in range(2):
        began, done, work = waits_for_a_later_one(calls)
        done.wait()
        work.wait()
        assert time.monotonic() - began < 5
    order = []
    for n in range(5):
        calls.run(lambda n=n: order.append(n), "", [], True)
    calls.run(lambda: order.append(5), "", [], False)
    assert order == list(range(6))


def test_a_callback_that_is_not_left_behind_would_wait_for_ever(calls, monkeypatch):
    monkeypatch.setattr(module, "_CALLBACK_SECONDS", 60.0)
    _, _, work = waits_for_a_later_one(calls)
    time.sleep(1.0)
    assert not work.is_completed()
    monkeypatch.setattr(module, "_CALLBACK_SECONDS", 0.1)
    work.wait()


def test_errors_are_the_calls_own_and_the_next_one_runs(calls):
    def fails():
        raise GroupAborted("no")

    work = calls.run(fails, "", [], True)
    with pytest.raises(GroupAborted, match="no"):
        work.wait()
    assert calls.run(lambda: None, "", [], True).wait()


def test_nothing_is_kept_of_a_call_that_is_over(calls, monkeypatch):
    monkeypatch.setattr(module, "_IDLE_SECONDS", 60.0)  # or the thread that ran it ends, and keeps nothing either
    x = torch.ones(3)
    gone = weakref.ref(x)
    calls.run(lambda x=x: x.add_(1), "", [x], True).wait()
    del x
    end = time.monotonic() + 5
    while gone() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


def test_after_close(calls):
    calls.run(lambda: None, "", [], True).wait()
    calls.close()
    with pytest.raises(GroupAborted, match="destroyed"):
        calls.run(lambda: None, "", [], False)


def test_calls_behind_one_that_does_not_end_are_refused_by_close():
    calls, gate = CallQueue("stuck"), threading.Event()
    first = calls.run(lambda: gate.wait(30), "", [], True)
    second = calls.run(lambda: None, "", [], True)
    calls.close(0.2)
    with pytest.raises(GroupAborted, match="destroyed"):
        second.wait()
    assert not first.is_completed()
    gate.set()
    assert first.wait()


def test_many_groups_share_one_worker(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 20.0)  # on a busy machine 200 calls take longer than that
    before, most, ran = len(workers()), 0, []
    groups = [CallQueue(str(n)) for n in range(200)]
    for _ in range(3):
        works = [group.run(lambda: ran.append(len(workers())), "", [], True) for group in groups]
        for work in works:
            work.wait()
    most = max(ran)
    for group in groups:
        group.close()
    assert len(ran) == 600 and most <= before + 3  # one runs, one leads, one may just end
    assert len(workers()) <= before


def test_groups_whose_calls_wait_for_each_other_get_workers(monkeypatch):
    groups, gates = [CallQueue(str(n)) for n in range(4)], [threading.Event() for _ in range(4)]
    order = []

    def blocked(n):  # until the next group's call has run, and the last one's runs at once
        def action():
            assert n == 3 or gates[n + 1].wait(30)
            order.append(n)
            gates[n].set()

        return action

    works = [group.run(blocked(n), "", [], True) for n, group in enumerate(groups)]
    for work in works:
        work.wait()
    assert order == [3, 2, 1, 0]
    monkeypatch.setattr(module, "_MOST_BLOCKED", 1)  # without more workers they would wait for ever
    for gate in gates:
        gate.clear()
    works = [group.run(blocked(n), "", [], True) for n, group in enumerate(groups)]
    time.sleep(0.5)
    assert not any(work.is_completed() for work in works)
    monkeypatch.setattr(module, "_MOST_BLOCKED", 8)
    for work in works:
        work.wait()
    for group in groups:
        group.close()


def test_an_interrupted_wait_is_reported_and_leaves_nothing_taken():
    told, gate = [], threading.Event()
    calls = CallQueue("test")
    work = calls.run(lambda: gate.wait(30), "", [], True, told.append)

    def interrupt(*_):
        raise LookupError("from a signal handler")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(LookupError, match="handler"):
            work.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [type(error) for error in told] == [LookupError]
    gate.set()
    assert work.wait() and calls.run(lambda: None, "", [], False).wait()
    calls.close()


def test_calls_over_the_kernels_run_in_the_order_in_which_they_were_made():
    groups, order, gate = [CallQueue(str(n), one_at_a_time=True) for n in range(3)], [], threading.Event()
    works = [groups[0].run(lambda: gate.wait(30), "", [], True)]
    expected = [0, 0, 1, 2, 0, 1, 1, 2, 0]
    for number, n in enumerate(expected):
        works.append(groups[n].run(lambda number=number: order.append(number), "", [], True))
    free = CallQueue("free")  # of a group that is not over the kernels
    assert free.run(lambda: None, "", [], False).wait()
    time.sleep(4 * module._PATIENCE_SECONDS)
    assert order == []
    gate.set()
    for work in works:
        work.wait()
    assert order == list(range(len(expected)))
    for group in [*groups, free]:
        group.close()


def test_a_callback_of_one_group_may_call_another_one_over_the_kernels():
    a, b = CallQueue("a", one_at_a_time=True), CallQueue("b", one_at_a_time=True)
    order, gate = [], threading.Event()
    first = a.run(lambda: gate.wait(30), "", [], True)
    done = first.get_future().then(lambda f: b.run(lambda: order.append("nested"), "", [], False))
    works = [a.run(lambda: order.append("next"), "", [], True)]
    gate.set()
    for work in (done, *works):
        work.wait()
    assert order == ["nested", "next"]
    a.close()
    b.close()


def test_a_future_that_its_user_completes_spoils_no_other_call(calls):
    gate = threading.Event()
    first = calls.run(lambda: gate.wait(30), "", [], True)
    first.get_future().set_result([])
    gate.set()
    assert calls.run(lambda: None, "", [], False).wait()


def test_a_group_that_made_no_call_is_closed_without_a_thread(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread starts"))
    CallQueue("unused").close()


def test_a_work_is_complete_when_its_future_is(monkeypatch):
    """A waiter of the future may go on before the future's callbacks, one of which opens the latch, have run."""
    work = PendingWork("a call", [torch.ones(1)], lambda error: None)
    future = work.get_future()
    monkeypatch.setattr(work._over, "open", lambda: None)
    assert not work.is_completed() and not work.is_success()
    work.finish()
    assert future.done() and work.is_completed() and work.is_success()
