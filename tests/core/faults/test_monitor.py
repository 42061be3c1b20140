"""The monitor over a control page made of plain arrays: running calls count, queued ones do not."""

from __future__ import annotations

import numpy as np
import pytest

from tricomm.core.watch.monitor import Monitor
from tricomm.kernels import layout
from tricomm.store.control import RankState


class Peer:
    """The page of a rank."""

    def __init__(self, control, rank):
        self.control, self.rank = control, rank

    @property
    def heartbeat(self):
        quiet = self.rank in self.control.quiet
        self.control.beats += not quiet
        return 1 if quiet else self.control.beats

    @property
    def state(self):
        return RankState.CLOSED if self.rank in self.control.closed else RankState.READY

    def device_words(self):
        return self.control.pages[self.rank]

    sequence = lambda self: 0  # noqa: E731
    fault = last = lambda self: None
    called = lambda self, sequence: None  # noqa: E731


class Control:
    """Three ranks, this one is 0; `dead` and `closed` are sets of ranks."""

    rank, world_size, group, peers = 0, 3, "fake", (1, 2)

    def __init__(self):
        self.pages = [np.zeros(512, np.int64) for _ in range(3)]
        self.dead, self.closed, self.beats = set(), set(), 0
        self.quiet, self.ticks = set(), 0  # ranks without heartbeats, and the CPU time of all
        for page in self.pages:
            page[layout.ENDED : layout.CONTROL_WORDS] = 5

    def own(self):
        return Peer(self, 0)

    def page(self, rank):
        return Peer(self, rank)

    def cpu_ticks(self, rank):
        return self.ticks

    def alive(self, rank):
        return rank not in self.dead

    def pid(self, rank):
        return 1000 + rank

    raise_fault = set_state = lambda self, said: None
    stopped = lambda self, rank: False  # noqa: E731


def after(control, seconds, tick=0.02, works=lambda seconds: False):
    """The first fault that a monitor finds, and when; None where it finds none. The peers run if `works(seconds)`."""
    monitor = Monitor(control, 600.0, 30.0)
    monitor._describe = "message {}".format
    for n in range(round(seconds / tick)):
        control.ticks += works(n * tick)
        monitor._look(tick)
        if monitor.fault is not None:
            return monitor.fault, (n + 1) * tick
    return None


def message(control, peer):
    control.pages[0][layout.MESSAGE], control.pages[0][layout.MESSAGE_PEER] = 1, peer


def test_a_dead_rank_in_a_collective_is_noticed_at_once_if_other_calls_are_queued_after_it():
    control = Control()
    control.pages[0][layout.STARTED] = 5  # runs: its end is not later
    control.pages[1][layout.ENDED : layout.CONTROL_WORDS] = 6
    control.dead = {2}
    message(control, 1)
    fault, seconds = after(control, 3.0)
    assert (fault.kind, fault.culprit) == ("PeerDied", 2) and seconds <= 0.1


@pytest.mark.parametrize("gone", ["dead", "closed"])
def test_a_message_has_a_second_after_its_peer_left(gone):
    control = Control()
    assert after(control, 5.0) is None  # nothing runs
    message(control, 1)
    setattr(control, gone, {2})
    assert after(control, 5.0) is None  # it does not need that one
    setattr(control, gone, {1})
    fault, seconds = after(control, 5.0)
    assert (fault.kind, fault.culprit) == ("PeerDied", 1) and 1.0 < seconds < 1.2 and "message 1" in fault.text


@pytest.mark.parametrize("killed", [1, 2])
def test_a_rank_that_closes_after_a_death_is_not_blamed_for_it(killed, monkeypatch):
    """It may have seen the death in another group and closed this one first."""
    control = Control()
    control.pages[0][layout.STARTED] = 5
    control.dead, control.closed = {killed}, {3 - killed}
    fault, _ = after(control, 3.0)
    assert (fault.kind, fault.culprit) == ("PeerDied", killed) and f"(pid {1000 + killed}) died" in fault.text
    monkeypatch.setattr(Monitor, "_killed", lambda monitor: None)
    assert after(control, 3.0)[0].culprit == 1, "without the look at all ranks it is the first one that is gone"


def test_a_receive_from_any_rank_fails_if_a_peer_died_or_all_have_left():
    control = Control()
    message(control, -1)
    control.closed = {1}
    assert after(control, 5.0) is None
    control.closed = {1, 2}
    assert after(control, 5.0)[0].kind == "PeerDied"
    control.closed, control.dead = set(), {2}
    assert after(control, 5.0)[0].culprit == 2


def test_cpu_time_is_a_sign_of_life_and_a_stop_after_it_is_named_within_the_limit():
    control = Control()
    control.pages[0][layout.STARTED] = 5
    control.pages[1][layout.ENDED : layout.CONTROL_WORDS] = 6
    control.quiet = {2}
    assert after(control, 200.0, works=lambda seconds: True) is None
    assert after(control, 200.0, works=lambda seconds: seconds % 3.0 < 0.01) is None, "it waits for a disk"
    for works in range(20, 23):
        fault, seconds = after(control, 100.0, works=lambda now, end=works: now < end)
        assert (fault.kind, fault.culprit) == ("PeerStalled", 2) and works + 29.0 < seconds < works + 31.0


def test_a_completed_message_waits_for_no_peer():
    control = Control()
    message(control, 1)
    control.pages[0][layout.MESSAGE_ENDED] = 1
    control.dead = {1}
    assert after(control, 5.0) is None


def test_a_late_rank_is_named_and_its_wait_is_counted():
    control = Control()
    control.pages[0][layout.STARTED] = 5
    control.pages[1][layout.ENDED : layout.CONTROL_WORDS] = 6
    monitor = Monitor(control, 3.0, 30.0)
    looks = 0
    while monitor.fault is None and looks < 200:
        monitor._look(0.02)
        looks += 1
    assert (monitor.fault.kind, monitor.fault.culprit) == ("CollectiveTimeout", 2) and 150 <= looks <= 153
    assert monitor.fault.text.startswith("timeout after 3 s: rank 2 (alive)")
    assert control.pages[0][layout.ABORT] == 1, "its kernels leave"
    assert monitor.waited[2] > 2.9
