"""Channels: calls that run side by side, share nothing, and name their channel in every error."""

from __future__ import annotations

import inspect
import os
import signal
import textwrap

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies import channel_bodies as bodies
from tests.marks import some
from tricomm.core import bootstrap, topology_agreement
from tricomm.core import group as group_module
from tricomm.core.group import Group
from tricomm.core.topology_agreement import DeviceFacts, agree_on_devices
from tricomm.kernels import layout

OPTIONS = tricomm.Options(channels=3, arena_bytes=1 << 18, timeout=30.0)
TWO = tricomm.Options(channels=2, arena_bytes=1 << 18, timeout=2.0)


def simulated(body, options=OPTIONS, world_size=2, seed=0):
    """The ranks' outcomes: what they return, or (name, text) of the error that they raise."""

    def run(comm):
        try:
            return body(comm)
        except tricomm.TricommError as error:
            return type(error).__name__, str(error)

    return tricomm.simulate(run, world_size, seed, options=options)


# Results


@pytest.mark.parametrize("seed", some([0, 1, 2, 3], 1))
def test_calls_of_several_channels_at_once_are_exact(seed):
    assert simulated(bodies.all_kinds_at_once, world_size=3, seed=seed) == [[]] * 3


def test_functions_that_share_a_channel_take_turns():
    assert simulated(bodies.one_channel_twice, TWO) == [([3.0] * 4, [3.0] * 4)] * 2
    report = tricomm.check(bodies.one_channel_twice, world_size=2, schedules=3, options=TWO)
    assert report.ok, report  # the lock orders them


def test_the_bits_are_those_of_one_channel():
    for outcome in simulated(bodies.one_sum_in_every_channel, world_size=3):
        alone, *others = outcome
        assert all(torch.equal(alone, other) for other in others)


def test_every_schedule_is_free_of_races_between_channels():
    report = tricomm.check(bodies.two_at_once, world_size=2, schedules=4, options=TWO)
    assert report.ok, report.findings


def test_two_threads_of_a_process_begin_in_another_order_on_every_rank(url):
    """Interpreted kernels run one at a time in a process: a kernel that waits lets the other thread's run."""
    assert ranks.run(2, bodies.in_threads, url) == [[[10.0, 30.0], [1, 1]]] * 2


def test_without_that_turn_they_wait_for_each_other(url):
    outcomes = ranks.run(2, bodies.in_threads_without_turns, url)
    assert all("CollectiveTimeout" in outcome or "GroupAborted" in outcome for outcome in outcomes), outcomes


# Errors


def test_a_mismatch_is_named_with_its_channel_while_the_others_are_right():
    for name, text in simulated(bodies.different_in_channel_1, TWO):
        assert name == "CollectiveMismatch"
        assert "channel 1: ranks made different calls" in text and "count=8" in text and "count=9" in text


def test_one_call_in_two_channels_is_a_timeout_that_says_so():
    outcomes = simulated(bodies.one_call_in_two_channels, TWO)
    assert any(name == "CollectiveTimeout" for name, _ in outcomes)
    (mine, theirs), text = ((0, 1), (1, 0)), outcomes[0][1] + outcomes[1][1]
    said = "it has made no call; in channel {1}, in which rank {0} has not, it has called all_reduce"
    assert said.format(*mine) in text or said.format(*theirs) in text


def test_two_launches_of_one_channel_are_named_as_before():
    name, text = simulated(bodies.overlapped_in_channel_1, TWO)[0]
    assert name == "GroupAborted" and "channel 1: two launches of this communicator overlapped" in text


def test_a_killed_rank_is_named_with_the_channel_that_waits_for_it(url):
    with ranks.start(2, bodies.killed_in_channel_1, url) as started:
        pid = started.message(1)
        started.message(0)
        os.kill(pid, signal.SIGKILL)
        name, text = started.results()[0].value
    assert name == "PeerDied" and "channel 1: rank 1" in text and "all_reduce" in text


def test_an_interrupt_while_functions_run_ends_their_calls_on_all_ranks(url):
    left, told = ranks.run(2, bodies.interrupted_side_by_side, url)
    assert left == []
    assert "rank 0 was stopped by KeyboardInterrupt" in told


def test_what_a_communicator_has_not_is_refused():
    def body(comm):
        results = [comm.channel(k).number for k in (0, 1)]
        for strange in (2, -1, True, "1", 1.0):
            with pytest.raises(tricomm.InvalidArgument, match=r"has 2, numbered from 0"):
                comm.channel(strange)
        with pytest.raises(tricomm.InvalidArgument, match="side_by_side: functions without arguments"):
            comm.side_by_side(3)
        with pytest.raises(ZeroDivisionError):  # the user's own error costs the group nothing
            comm.side_by_side(lambda: 1 // 0, lambda: comm.channel(1).barrier())
        x = torch.ones(5)
        comm.channel(1).all_reduce(x)
        return results, x[0].item(), repr(comm.channel(1))[:20]

    assert simulated(body, TWO) == [([0, 1], 2.0, "channel 1 of tricomm")] * 2
    for strange in (0, 9, True, 1.5):
        with pytest.raises(tricomm.InvalidArgument, match=r"Options.channels=.*an integer from 1 to 8"):
            tricomm.Options(channels=strange)


def test_more_channels_than_the_arena_holds_are_an_error_on_all_ranks(url):
    for name, text in ranks.run(2, bodies.join, url, [dict(channels=8, arena_bytes=layout.MIN_ARENA)] * 2):
        assert name == "InvalidArgument" and "is too small for channels=8 of 2 ranks: at least 131072 bytes" in text


def test_other_numbers_of_channels_on_other_ranks_are_an_error_on_all(url):
    for name, text in ranks.run(2, bodies.join, url, [dict(channels=2), dict(channels=3)]):
        assert name == "RendezvousError" and "has other options than rank" in text


# GPUs, as far as facts go


class Alone:
    """A control page whose exchanges are with ranks that have the facts of `others`."""

    def __init__(self, *others):
        self.others = others

    def exchange(self, payload, what, timeout):
        packed = [(f.uuid.encode(), f.architecture.encode(), f.processors, f.queues) for f in self.others]
        return [payload, *(topology_agreement._DEVICE.pack(*values) for values in packed)]


GPU = DeviceFacts("GPU-1", "sm_90", 132, 32)


def test_all_channels_together_have_no_more_blocks_than_are_resident():
    mine, theirs = GPU._replace(uuid="GPU-0"), GPU
    for channels, most in ((1, 64), (2, 64), (3, 44), (8, 16)):
        _, blocks = agree_on_devices(Alone(theirs), mine, None, 1.0, channels)
        assert blocks == most and channels * blocks <= 132
    shared = agree_on_devices(Alone(GPU), GPU, None, 1.0, 4)[1]
    assert shared == 16, "ranks that share a GPU share its processors"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"processors": 3}, "too few processors for a block of each"),
        ({"queues": 8}, r"needs 16 hardware queues.*rank\(s\) \[1\] have 8: set CUDA_DEVICE_MAX_CONNECTIONS=32"),
        ({"queues": 1}, "hardware queues"),
    ],
)
def test_channels_whose_kernels_could_not_run_at_once_are_refused(change, text):
    theirs = GPU._replace(**change)
    with pytest.raises(tricomm.InvalidArgument, match=text):
        agree_on_devices(Alone(theirs), GPU._replace(uuid="GPU-0"), None, 1.0, 4)
    agree_on_devices(Alone(theirs), GPU._replace(uuid="GPU-0"), None, 1.0, 1)


@pytest.mark.parametrize(("given", "queues"), [("", 8), ("1", 1), ("32", 32), ("many", 8)])
def test_hardware_queues_are_those_that_the_driver_makes(given, queues, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    assert tricomm.env.hardware_queues() == queues


@pytest.mark.parametrize(("channels", "started", "asked"), [(2, False, ["32"]), (2, True, []), (1, False, [])])
def test_the_driver_is_asked_for_queues_before_it_starts(channels, started, asked, monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(tricomm.env, "default", lambda name, value: given.append(value))
    bootstrap.layout_of(2, torch.device("cuda", 0), tricomm.Options(channels=channels))
    assert given == asked


# Without what keeps channels apart


MUTANTS = {
    "one slice for all": ("self.channel * memory.slice", "0"),
    "the peers' slice of channel 0": ("[base and base + start for base in arena.bases]", "arena.bases"),
    "headers in another channel's": ("self.channel * memory.slice", "self.channel * 512"),
}


def without(monkeypatch, old, new):
    """Tables are written with `new` in place of `old`."""
    source = textwrap.dedent(inspect.getsource(Group._write_table))
    assert source.count(old) == 1
    names = dict(vars(group_module))
    exec(source.replace(old, new), names)
    monkeypatch.setattr(Group, "_write_table", names["_write_table"])


@pytest.mark.parametrize("name", MUTANTS)
def test_without_what_keeps_channels_apart_calls_are_wrong(name, monkeypatch):
    without(monkeypatch, *MUTANTS[name])
    report = tricomm.check(bodies.two_at_once, world_size=2, schedules=4, options=TWO)
    assert not report.ok


def test_without_control_words_of_its_own_a_channels_fault_is_not_named(monkeypatch):
    without(monkeypatch, "layout.control_words(self.channel).start", "0")
    outcomes = simulated(bodies.different_in_channel_1, TWO)
    assert not any("channel 1: ranks made" in str(outcome) for outcome in outcomes)
