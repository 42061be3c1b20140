"""The agreement on a smaller group: all ranks that are left have it, or all raise, whatever fails, and when."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch

from tests import ranks
from tests.store.cuda.fake_driver import FakeCuda
from tests.store.store_ranks import in_threads, nothing_left, pages
from tricomm.deadline import Deadline
from tricomm.errors import CollectiveTimeout, GroupAborted, InvalidArgument, PeerDied, ResourceError, TricommError
from tricomm.store.arenas.cuda_vmm import open_cuda_vmm
from tricomm.store.arenas.posix_shm import open_posix_shm
from tricomm.store.ballot import Ballot
from tricomm.store.control import ControlPage
from tricomm.store.descriptors import DescriptorSocket
from tricomm.store.proposal import Proposal
from tricomm.store.segments import Segment
from tricomm.store.shrink import Shrink


def shrunk(control, exclude, seconds=10.0, more=lambda made, undo: None, before_end=lambda: None):
    """Shrink on one rank: return the new page, after `more`, or raise the error and leave nothing."""
    part = Shrink(control, exclude, Deadline(seconds))
    with ExitStack() as undo:
        try:
            part.agree()
            undo.callback((made := part.connect()).close)
            made.agree(None, "shrink", seconds)
            more(made, undo)
            before_end()
            part.decide()
        except BaseException as error:
            part.give_up(error)
            raise
        finally:
            part.close()
        undo.pop_all()
    made.limit = None
    return made


def close(outcomes):
    for made in outcomes:
        if isinstance(made, ControlPage):
            made.close()


def all_or_none(outcomes):
    """Whether all have the group; fails if some have it and others raised."""
    has = [isinstance(outcome, ControlPage) for outcome in outcomes]
    assert all(has) or not any(has), outcomes
    assert all(has) or all(isinstance(outcome, TricommError) for outcome in outcomes), outcomes
    return all(has)


@pytest.mark.parametrize(("world_size", "out"), [(2, {0}), (3, set()), (3, {1}), (5, {0, 3}), (4, {1, 2, 3})])
def test_the_ranks_that_are_left_make_a_group(world_size, out):
    with nothing_left(), pages(world_size) as old:
        left = [rank for rank in range(world_size) if rank not in out]
        made = in_threads(len(left), lambda place: shrunk(old[left[place]], frozenset(out)))
        assert all_or_none(made)
        assert [(page.rank, page.world_size) for page in made] == [(place, len(left)) for place in range(len(left))]
        assert len({page.nonce for page in made}) == 1 and made[0].nonce != old[0].nonce
        said = in_threads(len(left), lambda place: made[place].exchange(bytes([place]), "x", 10))
        assert said == [[bytes([place]) for place in range(len(left))]] * len(left)
        close(made)
        for rank in out:  # one that was left out, and did not know
            for asks in (None, frozenset()):
                assert isinstance(in_threads(1, lambda _: shrunk(old[rank], asks))[0], GroupAborted)  # noqa: B023


def test_a_closed_rank_counts_as_ended_and_another_end_is_named():
    with pages(3) as old:
        old[2].close()
        outcomes = in_threads(2, lambda rank: shrunk(old[rank], frozenset([])))
        assert [type(outcome) for outcome in outcomes] == [PeerDied] * 2 and "rank 2 closed" in str(outcomes[0])
        made = in_threads(2, lambda rank: shrunk(old[rank], None if rank else frozenset([2])))
        assert all_or_none(made)
        close(made)


def test_a_rank_that_is_left_out_and_wants_another_group_is_a_mismatch():
    asked = [frozenset([2, 3]), frozenset([2, 3]), frozenset([0, 1]), frozenset([0, 1])]
    with nothing_left(), pages(4) as old:
        barrier, agreed = threading.Barrier(4), Shrink._agreed

        def together(self):  # all proposals are written before one is read
            if not vars(self).setdefault("met", False):
                barrier.wait(10)
                self.met = True
            return agreed(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Shrink, "_agreed", together)
            outcomes = in_threads(4, lambda rank: shrunk(old[rank], asked[rank]))
        assert [type(outcome) for outcome in outcomes] == [InvalidArgument] * 4, outcomes


def test_records_keep_all_that_they_say():
    for exclude, invited, again in ((None, (), True), (frozenset(), (3, 0), False), (frozenset([1]), (), True)):
        said = Proposal(7, 9, exclude, 8, b"s" * 8, b"n" * 16, invited, b"why", again)
        assert Proposal.unpack(said.pack(), 2) == said
    long = Proposal(1, 1, frozenset(range(64)), invited=(2,) * 64, error=b"x" * 5000)
    assert len(long.pack()) <= shrink_bytes() and Proposal.unpack(long.pack(), 64).exclude == frozenset(range(64))


def shrink_bytes():
    from tricomm.store.page import SHRINK_BYTES

    return SHRINK_BYTES


# A rank gives up while the leader decides


class Moment:
    """Rank 1 gives up while rank 0, which has seen that all are ready, is about to vote (`first` is 1), or has voted
    and not said so yet (`first` is 0)."""

    def __init__(self, patch, old, first):
        self.old, self.voted = old, threading.Event()
        self.turn = [threading.Event(), threading.Event()]
        voting, follow = Ballot.vote, Shrink._follow

        def vote(ballot, yes):
            rank = 0 if yes else 1 if threading.current_thread().name == "rank 1" else 2
            if rank == 0:
                self.turn[1].set()  # it has read the pages of all ranks
            if rank != first and rank < 2:
                assert self.voted.wait(10)
            passed = voting(ballot, yes)
            if rank == first:
                self.voted.set()
            return passed

        def following(part):
            if part._rank == 1 and self.turn[1].wait(10):
                raise CollectiveTimeout("rank 1 has no time")
            return follow(part)

        patch.setattr(Ballot, "vote", vote)
        patch.setattr(Shrink, "_follow", following)

    def outcomes(self):
        return in_threads(3, lambda rank: shrunk(self.old[rank], frozenset()))


def half(outcomes):
    close(outcomes)
    return len({isinstance(outcome, ControlPage) for outcome in outcomes}) == 2


def test_a_rank_that_gives_up_before_the_leader_votes(monkeypatch):
    with nothing_left(), pages(3) as old:
        outcomes = Moment(monkeypatch, old, first=1).outcomes()
        assert not all_or_none(outcomes) and {type(outcome) for outcome in outcomes} == {CollectiveTimeout}, outcomes
        outcomes.clear()  # an error refers to the frames of its rank
        monkeypatch.undo()
        made = in_threads(3, lambda rank: shrunk(old[rank], frozenset()))
        assert all_or_none(made)
        close(made)


def test_a_rank_that_gives_up_after_the_leader_has_voted_has_the_group(monkeypatch):
    with nothing_left(), pages(3) as old:
        made = Moment(monkeypatch, old, first=0).outcomes()
        assert all_or_none(made)
        close(made)


@pytest.mark.parametrize("first", [0, 1])
def test_without_a_first_vote_that_counts_some_ranks_have_the_group(first, monkeypatch):
    with pages(3) as old:
        monkeypatch.setattr(Ballot, "vote", lambda ballot, yes: yes)
        assert half(Moment(monkeypatch, old, first).outcomes())


def test_without_a_vote_of_a_rank_that_gives_up_some_ranks_have_the_group(monkeypatch):
    vote = Ballot.vote
    with pages(3) as old:
        monkeypatch.setattr(Ballot, "vote", lambda ballot, yes: yes and vote(ballot, True))
        assert half(Moment(monkeypatch, old, first=1).outcomes())


def test_the_first_vote_is_the_outcome_for_all():
    for votes in itertools.product((True, False), repeat=3):
        with closing(Ballot()) as ballot:
            ballot.make()
            assert not ballot.passed
            assert [ballot.vote(yes) for yes in votes] == [votes[0]] * 3 and ballot.passed is votes[0]


# Every call that the system may refuse


class Refusing:
    """Refuses call number `nth` of those that it counts on rank `rank`, which is a thread."""

    def __init__(self, patch, rank):
        self.rank, self.nth, self.calls, self.names = rank, -1, 0, []
        for owner, name in (
            (os, "memfd_create"), (os, "posix_fallocate"), (os, "fchmod"), (os, "mkdir"), (os, "rmdir"),
            (Segment, "_map"), (DescriptorSocket, "bind"), (DescriptorSocket, "_send"), (DescriptorSocket, "_receive"),
            (ControlPage, "set_state"), (ControlPage, "beat"),
        ):  # fmt: skip
            patch.setattr(owner, name, self.counted(getattr(owner, name), name))

    def counted(self, function, name):
        def call(*args, **keywords):
            if threading.current_thread().name == f"rank {self.rank}":
                self.calls += 1
                if self.calls - 1 == self.nth:
                    self.names.append(name)
                    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return function(*args, **keywords)

        return call


def with_memory(made, undo):
    undo.callback(open_posix_shm(made, 4096, 10).close)


def until_none_is_refused(refusing, attempt):
    """Refuse each call in turn; returns the names of those that were refused."""
    for nth in range(400):
        with nothing_left(), pages(3) as old:
            if refuse(refusing, nth, attempt, old):
                return set(refusing.names)
    raise AssertionError("no end")


def refuse(refusing, nth, attempt, old):
    """Refuse call number `nth`, and then none; True if there was no such call."""
    refusing.nth, refusing.calls, seen = nth, 0, len(refusing.names)
    began = time.monotonic()
    outcomes = attempt(old)
    refusing.nth = -1
    assert time.monotonic() - began < 2 * ranks.BUSY, (refusing.names[seen:], outcomes)
    close(outcomes)
    has = {isinstance(one, ControlPage) for one in outcomes}
    assert len(has) == 1, (refusing.names[seen:], outcomes)
    if has == {False}:
        again = attempt(old)
        assert all_or_none(again), (refusing.names[seen:], again)
        close(again)
    assert len(refusing.names) > seen or has == {True}, outcomes
    return len(refusing.names) == seen


@pytest.mark.parametrize("rank", [0, 1])
def test_each_refusal_of_the_system_is_an_error_of_all_ranks(rank, monkeypatch):
    refusing = Refusing(monkeypatch, rank)
    names = until_none_is_refused(
        refusing, lambda old: in_threads(2, lambda r: shrunk(old[r], frozenset([2]), 20.0, with_memory))
    )
    assert {"memfd_create", "posix_fallocate", "_map", "bind", "_send", "_receive", "mkdir"} <= names


@contextmanager
def driver_of(world):
    drivers = [world.process(gpus) for gpus in ([0, 1, 2], [1, 0, 2], [2, 0, 1])]
    yield drivers
    world.verify()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_refusal_of_the_driver_is_an_error_of_all_ranks(rank):
    world, refused = FakeCuda(3), set[tuple[str, int]]()
    with nothing_left(), driver_of(world) as drivers:
        drivers[2].kill()
        left = [("", 0)]
        while left:
            with pages(3) as old:
                counts, arenas = drivers[rank].process.counts.copy(), dict[int, object]()

                def more(made, undo):
                    arena = open_cuda_vmm(made, 4096, torch.device("cuda:0"), 5.0, drivers[made.rank])
                    undo.callback(arena.close)
                    arenas[made.rank] = arena  # noqa: B023

                made = in_threads(2, lambda r: shrunk(old[r], frozenset([2]), 5.0, more))  # noqa: B023
                has = [isinstance(one, ControlPage) for one in made]
                assert all(has) or {type(one) for one in made} == {ResourceError}, made
                if all(has):
                    asked = drivers[rank].process.counts - counts
                    left = sorted((name, nth) for name in asked for nth in range(1, asked[name] + 1))
                    for arena in arenas.values():
                        arena.close()
                    close(made)
                left = [each for each in left if each not in refused]
                made.clear()  # an error refers to the frames of its rank
                if left:
                    refused.add(left[0])
                    drivers[rank].fail_at(*left[0])
        assert len(refused) > 5
