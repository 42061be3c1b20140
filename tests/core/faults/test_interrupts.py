"""An interrupt at any line of any call: the caller gets it, its peers are told, and no lock or memory is left."""

import os
import signal
import time

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tests import ranks
from tests.core.bodies import interrupt_bodies as bodies
from tests.core.bodies.common_bodies import attempt, right
from tests.core.faults.test_shrink import made
from tests.marks import some
from tricomm.core.calls.recovery_methods import RecoveryMethods
from tricomm.errors import CollectiveTimeout, GroupAborted, InvalidArgument
from tricomm.store.ballot import Ballot
from tricomm.store.handshake import _Handshake

SECONDS = 1.0 + ranks.BUSY


def check(name, kind, every, tmp_path, timeout=90.0):
    tmp_path.chmod(0o700)
    (mine, left), (others, left_there) = ranks.run(2, bodies.walk, str(tmp_path), name, kind, every, timeout=timeout)
    assert left == left_there == {}
    assert sum(raised is not None for _, _, raised, _ in mine) > len(mine) / 2
    for (where, caught, raised, free), (theirs, text, heard) in zip(mine, others, strict=True):
        if raised is None:  # a line that only some calls run, for example to wait
            continue
        assert caught == kind, where
        assert free, f"{where}: the lock is taken"
        assert theirs == "GroupAborted" and "rank 0" in text and kind in text, (where, theirs, text)
        assert heard - raised < SECONDS, where


NAMES = ("all_reduce", "barrier", "send", "split")
PAIRS = [(name, kind) for name in NAMES for kind in bodies.KINDS]


@pytest.mark.parametrize(("name", "kind"), some(PAIRS, lambda number, _: number % 4 in (0, 3)))
def test_some_lines(name, kind, tmp_path):
    check(name, kind, 20, tmp_path)


def test_without_the_guard_the_lock_stays_taken_or_no_peer_is_told(tmp_path):
    tmp_path.chmod(0o700)
    (mine, _), (others, _) = ranks.run(2, bodies.walk, str(tmp_path), "barrier", "Alarm", 12, True)
    free = all(free for _, _, _, free in mine)
    assert not free or any(theirs != "GroupAborted" for theirs, _, _ in others)


def test_every_line_of_close():
    [(got, left)] = ranks.run(1, bodies.closing, 1)
    assert left == {} and len(got) > 20
    assert all(caught == "KeyboardInterrupt" and closed for _, caught, closed in got), got


@pytest.fixture
def alone():
    options = tricomm.Options(arena_bytes=256 * 1024)
    with tricomm.Communicator(HashStore(), 0, 1, "cpu", options=options) as comm:
        yield comm


def in_the_middle(comm, action):
    """Have `action` run in the middle of each call, as a signal handler might."""
    announce = comm._launcher._announce

    def announced(sequence, record):
        action()
        announce(sequence, record)

    comm._launcher._announce = announced


def test_a_call_inside_a_call_is_refused_and_the_outer_one_completes(alone):
    refused = []

    def handler():
        for call in (alone.barrier, lambda: alone.broadcast(torch.ones(2), 7)):
            with pytest.raises(InvalidArgument) as caught:
                call()
            refused.append(str(caught.value))

    in_the_middle(alone, handler)
    x = torch.full((3,), 2.0)
    for _ in range(2):
        assert torch.equal(alone.all_reduce(x), torch.full((3,), 2.0))
    assert "a call inside another call of the same thread" in refused[0] and "src=7" in refused[1]
    assert len(refused) == 4 and bodies.lock_is_free(alone)


def test_an_interrupt_inside_a_call_inside_a_call_leaves_the_lock_to_the_outer_one(alone):
    held = []

    def handler():
        with bodies.Walk(KeyboardInterrupt, None) as seen, pytest.raises(InvalidArgument):
            alone.barrier()
        with bodies.Walk(KeyboardInterrupt, seen.lines[3]), pytest.raises(KeyboardInterrupt):
            alone.barrier()
        held.append(alone._launcher.lock.mine())

    in_the_middle(alone, handler)
    with pytest.raises(GroupAborted, match="stopped by KeyboardInterrupt"):
        alone.all_reduce(torch.ones(3))
    assert held == [True] and bodies.lock_is_free(alone)


def test_arguments_that_do_not_fit_cost_nothing(alone):
    with pytest.raises(TypeError):
        alone.all_reduce(torch.ones(3), nonsense=1)
    alone.all_reduce(torch.ones(3))


def check_set_up(every, tmp_path, timeout=90.0):
    tmp_path.chmod(0o700)
    (mine, left), (others, left_there) = ranks.run(2, bodies.constructor, str(tmp_path), every, timeout=timeout)
    assert left == left_there == {}
    told = 0
    for (caught, _, raised, _, where), (theirs, text, _, heard, _) in zip(mine, others, strict=True):
        if raised is None or not where.startswith(("store", "core/group", "core/bootstrap", "policy/user_tables")):
            continue  # not run by every call, or before the rendezvous, when the peers do not know this rank yet
        assert caught == "KeyboardInterrupt", where
        if "did not come" not in text:
            told += 1
            assert theirs in ("GroupAborted", "RendezvousError"), (where, theirs, text)
            assert "rank 0 was stopped by KeyboardInterrupt" in text, (where, theirs, text)
            assert heard - raised < SECONDS, where
    assert told > 5


def check_recovery(every, recover, tmp_path, timeout=90.0):
    tmp_path.chmod(0o700)
    (mine, left), (others, left_there) = ranks.run(2, bodies.recovering, str(tmp_path), every, recover, timeout=timeout)
    assert left == left_there == {}, (left, left_there)
    assert sum(raised is not None for _, _, raised, *_ in mine) > len(mine) / 2 > 2, mine
    for (caught, _, raised, _, where), (theirs, text, _, heard, _) in zip(mine, others, strict=True):
        if raised is not None:  # else this call did not run that line, for example to wait
            assert caught == "KeyboardInterrupt", where
            if recover is bodies.replaced and "did not come" in text:
                continue  # at the end of the rendezvous, as in a set-up
            named = theirs in ("GroupAborted", "PeerDied") or theirs == "RendezvousError" and recover is bodies.replaced
            assert named and "rank 0" in text, (where, theirs, text)
            assert heard - raised < SECONDS, where


RECOVERIES = [bodies.shrunk, bodies.replaced]


@pytest.mark.parametrize("recover", RECOVERIES)
def test_some_lines_of_a_recovery(recover, tmp_path):
    check_recovery(61, recover, tmp_path)


def stopped_at(rank, world_size, tell, url, recover, owner, step):
    """Rank 0 is interrupted at a `step` of its recovery: what each rank got. Then all recover."""
    comm = made(url, rank, world_size)
    usual = getattr(owner, step)

    def interrupt(*given, **keywords):
        setattr(owner, step, usual)
        raise KeyboardInterrupt

    if rank == 0:
        setattr(owner, step, interrupt)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            recover(comm)
        text, kind = "", "KeyboardInterrupt"
    else:
        time.sleep(0.2)
        began = time.monotonic()
        kind, text, _ = attempt(lambda: recover(comm, timeout=3 * ranks.BUSY))
    took = time.monotonic() - began
    ranks.together(url, 10 + rank, range(10, 10 + world_size))
    if rank == 0 and step == "_check_recoverable":  # the others saw no call of this rank: this is the one they missed
        with pytest.raises(CollectiveTimeout, match="did not call"):
            recover(comm)
    ranks.together(url, 20 + rank, range(20, 20 + world_size))
    comm = recover(comm)
    right(comm)
    comm.close()
    return kind, text, took


STEPS = [(recover, RecoveryMethods, step) for recover in RECOVERIES for step in ("_end_calls", "_check_recoverable")]


@pytest.mark.parametrize(("recover", "owner", "step"), [*STEPS, (bodies.replaced, _Handshake, "release")])
def test_an_interrupt_in_a_step_of_a_recovery_is_told(recover, owner, step, url):
    """One that comes before the call has begun is not: the others name the rank when their time is up."""
    with ranks.start(3, stopped_at, url, recover, owner, step) as started:
        outcomes = started.results()
    assert [outcome.error for outcome in outcomes] == [None] * 3, outcomes
    for kind, text, took in [outcome.value for outcome in outcomes[1:]]:
        if step != "_check_recoverable":
            assert kind == "GroupAborted" and "rank 0 was stopped by KeyboardInterrupt" in text, (kind, text)
            assert took < SECONDS
        else:
            assert kind == "CollectiveTimeout" and "rank(s) [0] did not call" in text, (kind, text)


def stopped_once_decided(rank, world_size, tell, url, recover):
    """Rank 0 is interrupted after its vote, which decides for the new group: what each rank got."""
    comm, vote = made(url, rank, world_size), Ballot.vote

    def and_interrupt(ballot, yes):
        Ballot.vote = vote
        vote(ballot, yes)
        raise KeyboardInterrupt

    if rank == 0:
        Ballot.vote = and_interrupt
        with pytest.raises(KeyboardInterrupt):
            recover(comm)
        return "KeyboardInterrupt", ""
    return attempt(lambda: recover(comm).barrier())[:2]


@pytest.mark.parametrize("recover", RECOVERIES)
def test_an_interrupt_after_the_vote_is_told_in_the_new_group(recover, url):
    (_, (kind, text)) = ranks.run(2, stopped_once_decided, url, recover)
    assert kind == "GroupAborted" and "rank 0 was stopped by KeyboardInterrupt" in text, (kind, text)


@pytest.mark.soak
@pytest.mark.parametrize("recover", RECOVERIES)
def test_every_line_of_a_recovery(recover, tmp_path):
    check_recovery(1, recover, tmp_path, timeout=1800.0)


def test_some_lines_of_the_set_up(tmp_path):
    check_set_up(53, tmp_path)


@pytest.mark.soak
def test_every_line_of_the_set_up(tmp_path):
    check_set_up(1, tmp_path, timeout=1800.0)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGUSR1, "Alarm")])
def test_a_signal_in_a_call_that_waits(number, kind, tmp_path):
    tmp_path.chmod(0o700)
    with ranks.start(2, bodies.waits, f"file://{tmp_path}/store", number, kind) as started:
        pid = started.message(0)
        time.sleep(0.5)
        os.kill(pid, number)
        mine, others = (outcome.value for outcome in started.results())
    assert mine == (kind, "", True)
    assert others[0] == "GroupAborted" and f"rank 0 was stopped by {kind}" in others[1]


@pytest.mark.soak
@pytest.mark.parametrize("name", bodies.CALLS)
def test_every_line(name, tmp_path):
    check(name, "KeyboardInterrupt", 1, tmp_path, timeout=900.0)
