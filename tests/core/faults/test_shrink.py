"""Shrink: a rank is killed, stopped or sent away, and the others go on as a smaller group, all of them or none."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import random
import signal
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import OWN, SMALL, attempt, leftovers, more_than, right
from tests.soak import kills
from tests.store.store_ranks import free_port
from tricomm.store.ballot import Ballot
from tricomm.store.page import Page
from tricomm.store.proposal import PHASES, Phase


def until_fault(comm):
    """Call until the group has a fault: its class, and when it was raised."""
    turn = 0
    try:
        while True:
            right(comm, turn := turn + 1)
    except tricomm.TricommError as error:
        return type(error).__name__, time.monotonic()


def made(url, rank, world_size, **options):
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**{**SMALL, **options}))
    right(comm)
    ranks.together(url, rank, range(world_size))  # no rank is in its last call any more
    return comm


def goes_on(rank, world_size, tell, url, exclude, options):
    """After a fault: the fault, the group's new place, the time of its first result, and what is left over."""
    before = leftovers()
    comm = made(url, rank, world_size, **options)
    tell(os.getpid())
    kind, caught = until_fault(comm)
    began = time.monotonic()
    new = comm.shrink(None if rank in (exclude or ()) else exclude)
    shrunk = time.monotonic() - began
    right(new)
    place = new.rank, new.world_size, new.options.arena_bytes, comm.world_size
    first = time.monotonic()
    refused = attempt(partial(right, comm))[:2], attempt(comm.shrink)[0], attempt(comm.barrier)[0]
    for turn in range(20):
        right(new, turn)
    new.barrier()
    new.close()
    del comm, new
    gc.collect()
    return kind, place, caught, shrunk, first, refused, more_than(before, *OWN)


@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 0), (3, 2), (4, 1)])
@pytest.mark.parametrize("named", [True, False])
def test_survivors_of_a_killed_rank_go_on(world_size, victim, named, url):
    with ranks.start(world_size, goes_on, url, [victim] if named else None, {}) as started:
        pids = started.messages()
        time.sleep(random.uniform(0, 0.2))
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        left = [rank for rank in range(world_size) if rank != victim]
        outcomes = started.results()
        for place, rank in enumerate(left):
            assert outcomes[rank].error is None, outcomes[rank]
            kind, now, _, shrunk, first, refused, more = outcomes[rank].value
            assert kind == "PeerDied" and now == (place, world_size - 1, SMALL["arena_bytes"], world_size)
            assert shrunk < 1.0 + ranks.BUSY and first - killed < 3.0 + 2 * ranks.BUSY
            assert refused[0][0] == refused[1] == refused[2] == "GroupAborted" and "closed" in refused[0][1]
            assert more == {}


def test_survivors_of_a_stopped_rank_go_on_and_it_is_told_when_it_wakes(url):
    def stopped(outcome):
        assert outcome.error == "GroupAborted", outcome
        assert "have gone on as a smaller group, without this rank" in outcome.text

    with ranks.start(3, goes_on, url, [1], {"stall_timeout": 0.6}) as started:
        pids = started.messages()
        os.kill(pids[1], signal.SIGSTOP)
        try:
            for rank in (0, 2):
                kind, place, *_, refused, more = started.results([rank])[rank].value
                assert kind == "PeerStalled" and place[:2] == (rank // 2, 2) and more == {}
        finally:
            os.kill(pids[1], signal.SIGCONT)
        stopped(started.results([1])[1])


@ranks.each(3)
def test_a_rank_is_sent_away_by_request(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    handle = comm.symmetric((8,), torch.float32)
    work = comm.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    ready = Path(url.removeprefix("file://")).parent / "ready"
    if rank == 1:
        ready.touch()  # its calls are over
        deadline = time.monotonic() + 60
        kind = text = ""
        while not kind or kind == "nothing":
            assert time.monotonic() < deadline
            kind, text, _ = attempt(comm.check)
            time.sleep(0.01)
        assert kind == "GroupAborted" and "ranks [0, 2] have gone on as a smaller group" in text, (kind, text)
        kind, text, _ = attempt(lambda: comm.shrink([0]))
        told = kind == "GroupAborted" and "without this rank" in text  # or the others have yet to finish
        assert told or kind == "InvalidArgument" and "leaves out [1]" in text, (kind, text)
        comm.close()
        return
    while not ready.exists():
        time.sleep(0.01)
    new = comm.shrink({1})
    right(new)
    assert (new.rank, new.world_size) == (rank // 2, 2)
    assert torch.equal(work.wait(), torch.full((4,), 3.0))  # it had run before
    assert attempt(lambda: handle.local)[0] == attempt(lambda: comm.launch(None, 1, handle))[0] == "GroupAborted"
    new.close()


@ranks.each(2)
def test_the_same_ranks_meet_again_after_a_fault_of_another_kind(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    kind, *_ = attempt(lambda: comm.all_reduce(torch.ones(3 + rank)))
    assert kind == "CollectiveMismatch"
    for exclude in ([], None, ()):
        comm = comm.shrink(exclude)
        right(comm)
    assert (comm.rank, comm.world_size) == (rank, world_size)
    comm.close()


@ranks.each(4)
def test_ranks_that_leave_out_different_ranks_are_all_told_and_keep_the_group(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    kind, text, _ = attempt(lambda: comm.shrink([2] if rank == 1 else [3] if rank == 0 else None))
    assert kind == "InvalidArgument" and "leaves out" in text, (kind, text)
    right(comm)
    comm.close()


@ranks.each(3)
def test_statistics_and_dumps_say_what_a_group_is_left_of(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    if rank == 1:
        return comm.close()
    for said in ("without rank(s) [1]", "again"):
        text = f"group {comm.group} {said}"
        comm = comm.shrink()
        right(comm)
        assert comm.stats().origin == text and f"simulated, {text}: " in str(comm.stats()), str(comm.stats())
        [path] = tricomm.dump(Path(url.removeprefix("file://")).parent / f"dump{rank}-")
        dumped = pickle.loads(path.read_bytes())["pg_config"].values()
        assert {"tricomm", f"tricomm, {text}"} <= {config["desc"] for config in dumped}, dumped
    comm.close()


def without_a_store(rank, world_size, tell, url, at):
    comm = tricomm.init(at, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
    ranks.together(url, rank, range(world_size))
    tell(os.getpid())
    lost = attempt(lambda: [right(comm, turn) for turn in itertools.count()])
    comm = comm.shrink()
    outcome = attempt(lambda: comm.split([0, 1]))
    right(comm)
    comm.close()
    return lost[:2], outcome[:2]


def test_split_names_the_end_of_the_store_and_the_group_stays(url):
    hosted = f"tcp://127.0.0.1:{free_port()}"  # by rank 0
    with ranks.start(3, without_a_store, url, hosted) as started:
        os.kill(started.messages()[0], signal.SIGKILL)
        outcomes = started.results([1, 2])
    for rank in (1, 2):
        (kind, text), (split, why) = outcomes[rank].value
        assert kind == "PeerDied" and "go on by shrink() or replace(), or make a new communicator" in text, text
        assert split == "RendezvousError" and "hosted it has ended" in why and "Communicator(store, ...)" in why, why


@ranks.each(2)
def test_wrong_arguments_are_refused_before_anything_is_said(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    for exclude in ([rank], [2], [-1], [True], [1 - rank, 1 - rank], "1", 1, [0.0], [None], numpy.array(1)):
        assert attempt(lambda exclude=exclude: comm.shrink(exclude))[0] == "InvalidArgument", exclude
    for timeout in (0, -1, "1", float("nan")):
        assert attempt(lambda timeout=timeout: comm.shrink([], timeout))[0] == "InvalidArgument", timeout
    right(comm)
    comm.close()


@ranks.each(3)
def test_a_rank_that_does_not_come_is_named_and_the_others_can_call_again(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    if rank == 2:
        time.sleep(1.5)
    else:
        kind, text, seconds = attempt(lambda: comm.shrink([], timeout=0.5))
        assert kind == "CollectiveTimeout" and "rank(s) [2] did not call shrink" in text and seconds < 1 + ranks.BUSY
        right_after = attempt(comm.check)
        assert right_after[0] == "nothing"
    comm = comm.shrink([], timeout=20)
    right(comm)
    comm.close()


@ranks.each(2)
def test_a_rank_that_comes_after_the_others_gave_up_is_told_at_once(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    time.sleep(1.5 * rank)
    kind, text, seconds = attempt(lambda: comm.shrink([], timeout=0.5 if rank == 0 else 60))
    assert kind == "CollectiveTimeout" and "rank(s) [1] did not call shrink" in text and seconds < 1 + ranks.BUSY
    right(comm)
    comm.close()


@ranks.each(2)
def test_a_capture_on_one_rank_is_told_to_all(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    if rank == 0:
        comm._group.captured = lambda what: tricomm.InvalidArgument(f"{what}: in a capture")
    kind, text, seconds = attempt(lambda: comm.shrink([], timeout=60))
    assert kind == "InvalidArgument" and "shrink: in a capture" in text and seconds < 1 + ranks.BUSY, (kind, text)
    ranks.together(url, 10 + rank, [10, 11])
    if rank == 0:
        del comm._group.captured
    comm = comm.shrink([])
    right(comm)
    comm.close()


_vote = Ballot.vote


def around_a_vote(before, after):
    def vote(ballot, yes):
        Ballot.vote = _vote
        before()
        passed = _vote(ballot, yes)
        after()
        return passed

    Ballot.vote = vote


def in_steps(rank, world_size, tell, url, victim, phase, exclude):
    """The victim ends itself as its call of shrink reaches `phase`; the others tell what they got, then go on."""
    comm = made(url, rank, world_size)
    if rank == 3:
        return comm.close()
    if rank == victim:
        fit = Page.step.fset

        def step(page, value):
            fit(page, value)
            if value % PHASES == phase:
                os.kill(os.getpid(), signal.SIGKILL)

        Page.step = property(Page.step.fget, step)
        if phase == "voted":
            around_a_vote(lambda: None, lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        comm = comm.shrink(exclude, timeout=30)
        first = "has it", [0, 0]
        second = until_fault(comm)[0]
    except tricomm.TricommError as error:
        first, second = (type(error).__name__, str(error)), ""
    comm = comm.shrink(timeout=30)
    right(comm)
    place = comm.rank, comm.world_size
    comm.close()
    return first, second, place


@pytest.fixture
def sockets(monkeypatch):
    """A directory for the sockets of this test alone, with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as folder:
        monkeypatch.setenv("TRICOMM_SOCKET_DIR", folder)
        yield folder


LED = [(0, phase) for phase in Phase if phase != Phase.WITHDRAWN]


@pytest.mark.parametrize(("victim", "phase"), [*LED, (0, "voted"), (2, Phase.PROPOSED), (2, Phase.READY)])
def test_a_rank_that_dies_in_a_step_of_shrink(victim, phase, url, sockets):
    exclude = [3]
    with ranks.start(4, in_steps, url, victim, phase, exclude) as started:
        outcomes = started.results([rank for rank in range(3) if rank != victim])
        assert os.listdir(sockets) == []  # not even the socket of the killed rank
    left = [rank for rank in range(3) if rank != victim]
    got = [outcomes[rank].value for rank in left]
    assert None not in got, outcomes
    has = phase in (Phase.DECIDED, "voted") or (victim and phase == Phase.READY)
    for place, (first, second, now) in enumerate(got):
        assert now == (place, 2), got
        assert (first[0], second) == ("has it", "PeerDied") if has else first[0] == "PeerDied", got
        assert has or f"rank {victim} (pid" in first[1] or "died" in first[1], got


def stopped_before_its_vote(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    if rank == 0:
        around_a_vote(lambda: os.kill(os.getpid(), signal.SIGSTOP), lambda: None)
    tell(os.getpid())
    kind, text, seconds = attempt(lambda: comm.shrink([], timeout=3.0))
    tell(kind)
    comm = comm.shrink([], timeout=60)
    right(comm)
    comm.close()
    return kind, text, seconds


def test_no_rank_waits_for_a_leader_that_is_stopped_and_it_has_no_group_when_it_wakes(url):
    with ranks.start(3, stopped_before_its_vote, url) as started:
        pids = started.messages()
        assert [started.message(rank) for rank in (1, 2)] == ["CollectiveTimeout"] * 2
        os.kill(pids[0], signal.SIGCONT)
        outcomes = started.results()
    for rank in range(3):
        assert outcomes[rank].error is None, outcomes[rank]
        kind, text, seconds = outcomes[rank].value
        assert kind == "CollectiveTimeout", (rank, text)
        assert rank == 0 or "rank(s) [0] did not finish" in text and seconds < 3.5 + ranks.BUSY, text


def late(rank, world_size, tell, url, calls):
    """Rank 1 is stopped in a call and continues while the others call in the smaller group."""
    comm = made(url, rank, world_size, stall_timeout=0.6)
    tell(os.getpid())
    kind, _ = until_fault(comm)
    if rank == 1:
        return kind
    comm = comm.shrink([1])
    tell("shrunk")
    for turn in range(calls):
        right(comm, turn)
    comm.close()
    return kind


def test_late_stores_of_a_rank_that_wakes_do_not_reach_the_smaller_group(url):
    with ranks.start(3, late, url, 60) as started:
        pids = started.messages()
        time.sleep(random.uniform(0, 0.05))
        os.kill(pids[1], signal.SIGSTOP)
        assert [started.message(rank) for rank in (0, 2)] == ["shrunk"] * 2
        os.kill(pids[1], signal.SIGCONT)
        outcomes = started.results()
    assert [outcome.error for outcome in outcomes] == [None] * 3, outcomes
    assert [outcome.value for outcome in outcomes] == ["PeerStalled"] * 3, outcomes


def test_ranks_are_killed_one_after_another_until_one_is_left():
    seed = random.randrange(1 << 32)
    try:
        found = kills.run(30, seed)
    except BaseException as error:
        error.add_note(f"python -m tests.soak.kills 30 {seed}")
        raise
    assert statistics.median(found.seconds) < 1.0 + ranks.BUSY, found.text()
