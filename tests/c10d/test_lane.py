"""The order of a group's calls: callbacks belong to their call, and what they call comes before what waits."""

import gc
import threading
import time
import weakref

import pytest
import torch

from tricomm.c10d import lane as module
from tricomm.c10d.lane import Lane
from tricomm.errors import GroupAborted


@pytest.fixture
def lane():
    found = Lane("test")
    yield found
    found.close()


def test_what_a_callback_calls_comes_before_what_waits(lane):
    order, gate = [], threading.Event()
    first = lane.run(lambda: (gate.wait(20), order.append("first")), "", [], True)

    def nested(future):
        work = lane.run(lambda: order.append("nested"), "", [], True)
        work.get_future().then(lambda f: lane.run(lambda: order.append("deeper"), "", [], False)).wait()

    first.get_future().then(nested)
    works = [lane.run(lambda: order.append("second"), "", [], True)]
    gate.set()
    lane.run(lambda: order.append("third"), "", [], False)
    for work in works:
        work.wait()
    assert order == ["first", "nested", "deeper", "second", "third"]


def test_a_callback_that_is_attached_late_comes_at_once_too(lane):
    order = []
    first = lane.run(lambda: order.append("first"), "", [], True)
    first.wait()
    time.sleep(0.05)
    first.get_future().then(lambda f: lane.run(lambda: order.append("nested"), "", [], False))
    lane.run(lambda: order.append("second"), "", [], False)
    assert order == ["first", "nested", "second"]


def waits_for_a_later_one(lane):
    """A callback that waits for a call that waits behind it: seconds until all is over."""
    gate, later = threading.Event(), []
    first = lane.run(lambda: gate.wait(20), "", [], True)
    done = first.get_future().then(lambda f: later[0].get_future().wait())
    later.append(lane.run(lambda: None, "", [], True))
    began = time.monotonic()
    gate.set()
    return began, done, later[0]


def test_a_callback_that_waits_for_a_later_call_is_left_behind(lane, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.2)
    for _ in range(2):
        began, done, work = waits_for_a_later_one(lane)
        done.wait()
        work.wait()
        assert time.monotonic() - began < 5
    order = []
    for n in range(5):
        lane.run(lambda n=n: order.append(n), "", [], True)
    lane.run(lambda: order.append(5), "", [], False)
    assert order == list(range(6))


def test_without_somebody_to_take_over_it_would_wait_for_ever(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 60.0)
    lane = Lane("stuck")
    _, _, work = waits_for_a_later_one(lane)
    time.sleep(1.0)
    assert not work.is_completed()
    with lane._order:  # and now somebody does
        lane._server, lane._callbacks = lane._start(lane._serve), 0
    work.wait()
    lane.close()


def test_errors_are_the_calls_own_and_the_next_one_runs(lane):
    def fails():
        raise GroupAborted("no")

    work = lane.run(fails, "", [], True)
    with pytest.raises(GroupAborted, match="no"):
        work.wait()
    assert lane.run(lambda: None, "", [], True).wait()


def test_nothing_is_kept_of_a_call_that_is_over(lane):
    x = torch.ones(3)
    gone = weakref.ref(x)
    lane.run(lambda x=x: x.add_(1), "", [x], True).wait()
    del x
    end = time.monotonic() + 5
    while gone() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


def test_after_close(lane):
    lane.run(lambda: None, "", [], True).wait()
    lane.close()
    with pytest.raises(GroupAborted, match="destroyed"):
        lane.run(lambda: None, "", [], False)
