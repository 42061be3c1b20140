"""The order of a group's calls: a call's name follows from the program, and no line of calls waits for another."""

import signal
import threading
import time

import pytest
import torch

from tricomm import threads
from tricomm.c10d import call_queue as module
from tricomm.c10d.call_queue import CallQueue
from tricomm.errors import GroupAborted, InvalidArgument, ResourceError


def record(calls, names, async_op=False):
    return calls.run(lambda turn: names.append(str(turn)), "", [], async_op)


def blocked(calls, gate):
    return calls.run(lambda turn: gate.wait(30) and None, "", [], True)


def program(calls, early):
    """Names of the calls of callbacks in every way of attaching them, while their call runs (`early`) or after it."""
    gate, heard, names, nested = threading.Event(), threading.Event(), [], []
    if not early:
        gate.set()
    works = [blocked(calls, gate), blocked(calls, gate)]
    if not early:
        for work in works:
            work.wait()
    first, second = (work.get_future() for work in works)

    def deeper(future):
        nested.append(record(calls, names, async_op=True).get_future().then(lambda f: record(calls, names)))
        return record(calls, names)

    one = first.then(deeper)
    first.add_done_callback(lambda f: record(calls, names) and heard.set())
    chained = one.then(lambda f: record(calls, names))
    again = chained.then(lambda f: record(calls, names))
    both = torch.futures.collect_all([second, first]).then(lambda f: record(calls, names))
    gate.set()
    for future in (one, again, both, *nested):
        future.wait()
    assert heard.wait(30)
    for work in works:
        work.wait()
    record(calls, names)
    return sorted(names)


NAMES = ["1/1.1.1/1", "1/1.1/1", "1/1/1", "1/1/1/1/1", "1/1/2", "1/2/1", "2/1.1/1", "3"]


@pytest.mark.parametrize("early", [True, False])
def test_a_call_is_named_by_the_program_whenever_its_callback_was_attached(calls, early):
    assert program(calls, early) == NAMES


def test_without_its_place_in_collect_all_a_callback_would_be_the_program(calls, monkeypatch):
    monkeypatch.setattr(torch._C, "_collect_all", module.CallFuture.__init__.__globals__["_collect_all"])
    names = []
    first = record(calls, names, async_op=True)
    first.wait()
    torch.futures.collect_all([first.get_future()]).then(lambda f: record(calls, names)).wait()
    assert names == ["1", "2"]


def test_a_callback_may_call_another_group_whose_ranks_know_its_own():
    a, b, names = CallQueue("a", range(4)), CallQueue("b", range(2)), []
    record(a, [], async_op=True).get_future().then(lambda f: record(b, names)).wait()
    assert names == ["1@a/1/1"]
    with pytest.raises(InvalidArgument, match="know that one by its name"):
        record(b, [], async_op=True).get_future().then(lambda f: record(a, names)).wait()
    twin = CallQueue("a", range(4))
    with pytest.raises(InvalidArgument, match="know that one by its name"):
        record(twin, [], async_op=True).get_future().then(lambda f: record(b, names)).wait()
    for calls in (a, b, twin):
        calls.close()


@pytest.mark.parametrize("first", ["program", "callback"])
def test_callbacks_that_are_attached_by_the_program_and_by_a_callback_count_for_themselves(calls, first):
    names, gate, attached = [], threading.Event(), threading.Event()
    a, b = blocked(calls, gate), record(calls, [], async_op=True)
    futures = []

    def attach(future):
        futures.append(b.get_future().then(lambda f: record(calls, names)))
        attached.set()

    a.get_future().then(attach)
    if first == "callback":
        gate.set()
        attached.wait(20)
    futures.append(b.get_future().then(lambda f: record(calls, names)))
    gate.set()
    attached.wait(20)
    for future in futures:
        future.wait()
    assert sorted(names) == ["2/(1/1)1/1", "2/1/1"]


def crosswise(calls):
    """A callback that waits for another one of the same future, which comes later."""
    gate, second = threading.Event(), threading.Event()
    future = blocked(calls, gate).get_future()
    done = [future.then(lambda f: second.wait(30)), future.then(lambda f: second.set())]
    gate.set()
    return done, second


def test_a_callback_may_wait_for_another_one(calls):
    done, _ = crosswise(calls)
    assert [future.wait() for future in done] == [True, None]


def test_in_one_thread_it_would_wait_for_ever(calls, monkeypatch):
    def no_thread(action):
        raise ResourceError("no")

    monkeypatch.setattr("tricomm.c10d.call_futures.run_in_helper", no_thread)
    done, second = crosswise(calls)
    time.sleep(0.5)
    assert not any(future.done() for future in done)
    second.set()
    for future in done:
        future.wait()


def test_a_calls_key_is_the_same_on_every_rank():
    a, b = CallQueue("a"), CallQueue("b")
    keys = [[], []]
    for queue, seen in zip((a, b), keys, strict=True):
        done = queue.run(lambda turn, seen=seen: seen.append(turn.line.key), "", [], True).get_future()
        for _ in range(2):
            done.then(lambda f, q=queue, seen=seen: q.run(lambda t: seen.append(t.line.key), "", [], False)).wait()
        queue.close()
    assert keys[0] == keys[1] and keys[0][0] == 0 and len(set(keys[0])) == 3


def waits_for_a_later_one(calls):
    """A callback that waits for a call that comes after its own."""
    gate, later = threading.Event(), []
    first = blocked(calls, gate)
    done = first.get_future().then(lambda f: later[0].get_future().wait())
    later.append(calls.run(lambda turn: None, "", [], True))
    gate.set()
    return done, later[0]


def test_a_callback_may_wait_for_a_later_call(calls):
    for _ in range(20):
        done, work = waits_for_a_later_one(calls)
        done.wait()
        work.wait()
    order = []
    for n in range(5):
        calls.run(lambda turn, n=n: order.append(n), "", [], True)
    calls.run(lambda turn: order.append(5), "", [], False)
    assert order == list(range(6))


def test_if_callbacks_held_the_line_it_would_wait_for_ever(calls, monkeypatch):
    def run_callbacks_first(line):
        for future in held:
            future.run_callbacks()
        return False

    held, execute = [], module.Line._execute
    monkeypatch.setattr(module.Line, "_execute", lambda line, call: held.extend(execute(line, call)) or held)
    monkeypatch.setattr(module.Line, "_hand_over", run_callbacks_first)
    gate, later = threading.Event(), []
    first = blocked(calls, gate)
    first.get_future().then(lambda f: later[0].over.wait(30))
    later.append(calls.run(lambda turn: None, "", [], True))
    gate.set()
    time.sleep(1.0)
    assert not later[0].is_completed()
    later[0].over.open()


def test_errors_are_the_calls_own_and_the_next_one_runs(calls):
    def fails(turn):
        raise GroupAborted("no")

    work = calls.run(fails, "", [], True)
    child = work.get_future().then(lambda f: f.value())
    with pytest.raises(GroupAborted, match="no"):
        work.wait()
    with pytest.raises(GroupAborted, match="no"):
        child.wait()
    assert isinstance(work.exception(), GroupAborted) and not work.is_success()
    assert calls.run(lambda turn: None, "", [], True).wait()


def test_a_callback_that_fails_spoils_no_other(calls, caplog):
    seen = []
    future = record(calls, [], async_op=True).get_future()
    future.add_done_callback(lambda f: 1 / 0)
    failed = future.then(lambda f: 1 // 0)
    future.then(lambda f: seen.append(1)).wait()
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    end = time.monotonic() + 30  # the thread that runs the first callback may still be at it
    while "a callback of call 1 has failed" not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    assert seen == [1] and "a callback of call 1 has failed" in caplog.text


def test_a_callback_finds_the_modes_of_the_thread_that_attached_it(calls):
    def modes(future):
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_default_device().type,
        )

    gate = threading.Event()
    future = blocked(calls, gate).get_future()
    with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
        one, here = future.then(modes), modes(None)
    with torch.inference_mode():
        other = future.then(modes)
    gate.set()
    assert one.wait() == here and here[0] is False and here[2:] == (True, torch.float16, "meta")
    assert other.wait()[:2] == (False, True)


def test_after_close(calls):
    calls.run(lambda turn: None, "", [], True).wait()
    calls.close()
    with pytest.raises(GroupAborted, match="destroyed"):
        calls.run(lambda turn: None, "", [], False)


def test_calls_after_one_that_does_not_end_are_refused_by_close():
    calls, gate = CallQueue("stuck"), threading.Event()
    first = blocked(calls, gate)
    while not first.id.name:
        time.sleep(0.01)
    second = calls.run(lambda turn: None, "", [], True)
    calls.close(0.2)
    with pytest.raises(GroupAborted, match="destroyed"):
        second.wait()
    assert not first.is_completed()
    gate.set()
    assert first.wait()


def test_close_in_a_callback_lets_the_calls_after_it_end(calls):
    gate = threading.Event()
    done = blocked(calls, gate).get_future().then(lambda f: calls.close())
    later = calls.run(lambda turn: None, "", [], True)
    gate.set()
    done.wait()
    assert later.wait()


def test_threads_end_with_their_calls():
    def workers():
        return sum(thread.name == "tricomm-helper" for thread in threading.enumerate())

    groups = [CallQueue(str(n)) for n in range(100)]
    works = [calls.run(lambda turn: None, "", [], True) for calls in groups for _ in range(3)]
    for work in works:
        work.wait()
    for calls in groups:
        calls.close()
    end = time.monotonic() + 10
    while workers() > 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert workers() <= 2


def test_any_number_of_calls_may_wait_for_each_other():
    groups, gates = [CallQueue(str(n)) for n in range(40)], [threading.Event() for _ in range(40)]
    order = []

    def until_the_next(n):  # the last one's runs at once
        def action(turn):
            assert n == 39 or gates[n + 1].wait(60)
            order.append(n)
            gates[n].set()

        return action

    works = [group.run(until_the_next(n), "", [], True) for n, group in enumerate(groups)]
    for work in works:
        work.wait()
    assert order == list(range(39, -1, -1))
    for group in groups:
        group.close()


def no_threads(*_):
    raise ResourceError("no more threads")


def test_if_no_thread_can_start_the_call_is_refused_and_has_no_number(calls, monkeypatch):
    monkeypatch.setattr("tricomm.threads._helpers", [])
    with monkeypatch.context() as patch:
        patch.setattr(threads, "start", no_threads)
        for async_op in (True, False):
            with pytest.raises(ResourceError, match="no more threads"):
                record(calls, [], async_op)
    names = []
    record(calls, names)
    assert names == ["1"]


def test_if_no_thread_can_start_callbacks_come_after_the_calls(calls, monkeypatch):
    gate, names = threading.Event(), []
    first = blocked(calls, gate)
    done = first.get_future().then(lambda f: record(calls, names))
    later = record(calls, names, async_op=True)
    while not first.id.name:
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr("tricomm.threads._helpers", [])
        patch.setattr(threads, "start", no_threads)
        gate.set()
        done.wait()
        later.wait()
    assert names == ["2", "1/1/1"]


def test_an_interrupted_wait_is_reported_and_leaves_nothing_taken():
    told, gate = [], threading.Event()
    calls = CallQueue("test")
    work = calls.run(lambda turn: gate.wait(30) and None, "", [], True, told.append)

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
    assert work.wait() and calls.run(lambda turn: None, "", [], False).wait()
    calls.close()


def test_a_future_that_its_user_completes_spoils_no_other_call(calls):
    gate = threading.Event()
    first = blocked(calls, gate)
    first.get_future().set_result([])
    gate.set()
    assert calls.run(lambda turn: None, "", [], False).wait()


def test_a_group_that_made_no_call_is_closed_without_a_thread(monkeypatch):
    monkeypatch.setattr(threads, "start", lambda *_: pytest.fail("a thread starts"))
    CallQueue("unused").close()


def test_a_work_is_complete_when_its_future_is(calls, monkeypatch):
    """A waiter of the future may go on before the latch is open."""
    gate = threading.Event()
    work = blocked(calls, gate)
    future = work.get_future()
    opened = work.over.open
    monkeypatch.setattr(work.over, "open", lambda: None)
    assert not work.is_completed() and not work.is_success()
    gate.set()
    future.wait()
    assert future.done() and work.is_completed() and work.is_success()
    opened()
