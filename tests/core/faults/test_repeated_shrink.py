"""Calls of shrink that fail, and the next ones: an error belongs to the calls that have met."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing, suppress
from functools import partial

import pytest

from tests.store.store_ranks import in_threads, nothing_left, pages
from tests.store.test_shrink import all_or_none, close, shrunk
from tricomm.deadline import Deadline
from tricomm.errors import CollectiveTimeout, InvalidArgument, PeerDied, ResourceError, TricommError
from tricomm.store.proposal import PHASES, Phase, Proposal
from tricomm.store.shrink import Shrink


def calls_of_a_fast_and_a_slow_rank(old):
    """Rank 3 has ended, ranks 0 and 1 leave out rank 2, and then also rank 3 once they are told; rank 1 calls for the
    first time in the middle of the second call of rank 0. How the calls of each failed before it had a group."""
    again = threading.Event()
    old[3].close()

    def calls(rank):
        failures, out = [], frozenset([2])
        if rank:
            assert again.wait(10)
        while len(failures) < 5:
            try:
                made = shrunk(old[rank], out)
                made.close()
                return failures
            except TricommError as error:
                failures.append(type(error))
                out = frozenset([2, 3])
                if not rank:
                    threading.Timer(0.1, again.set).start()
        return failures

    return in_threads(2, calls)


@pytest.fixture
def slow_to_look(monkeypatch):
    """Rank 1 has shown its call for a while before it looks at the others'."""
    agreed = Shrink._agreed

    def late(part):
        if part._rank == 1:
            time.sleep(0.2)
        return agreed(part)

    monkeypatch.setattr(Shrink, "_agreed", late)


def test_one_death_makes_one_call_of_each_rank_fail(slow_to_look):
    with nothing_left(), pages(4) as old:
        assert calls_of_a_fast_and_a_slow_rank(old) == [[PeerDied], [PeerDied]]


def test_without_a_look_at_calls_without_hope_a_fast_rank_fails_again(slow_to_look, monkeypatch):
    class Read(Proposal):
        def hopeless(self, gone):
            return False

    monkeypatch.setattr(Proposal, "unpack", Read.unpack)
    with pages(4) as old:
        fast, slow = calls_of_a_fast_and_a_slow_rank(old)
        assert fast[:2] == [PeerDied, InvalidArgument]


def counted(monkeypatch):
    """Each call that fails has failed its attempt."""
    post = Shrink._post

    def posted(part, phase, **changes):
        failed = {"failed": part._mine.attempt} if phase == Phase.WITHDRAWN else {}
        post(part, phase, **{**changes, **failed})

    monkeypatch.setattr(Shrink, "_post", posted)


def test_without_a_death_that_fails_no_attempt_a_fast_rank_fails_again(slow_to_look, monkeypatch):
    counted(monkeypatch)
    with pages(4) as old:
        fast, slow = calls_of_a_fast_and_a_slow_rank(old)
        assert fast[:2] == [PeerDied, PeerDied]


def test_a_rank_that_does_not_see_that_another_left_the_call_is_waited_for_without_a_clock(monkeypatch):
    ready, agreed = Shrink.look_at_members, Shrink._agreed
    first = threading.Event()

    def slow(part):  # rank 1 is starved in its first call, for longer than any pause
        if part._rank == 1 and not first.is_set():
            first.set()
            time.sleep(2.5)
        return ready(part)

    def fails(part):
        done = agreed(part)
        if done and part._rank == 0 and part._mine.number == 1:
            assert first.wait(10)
            raise CollectiveTimeout("rank 0 has no time")
        return done

    monkeypatch.setattr(Shrink, "look_at_members", slow)
    monkeypatch.setattr(Shrink, "_agreed", fails)
    with nothing_left(), pages(2) as old:

        def calls(rank):
            with suppress(CollectiveTimeout):
                return shrunk(old[rank], frozenset()), 0
            return shrunk(old[rank], frozenset()), 1

        outcomes = in_threads(2, calls)
        assert [failed for _, failed in outcomes] == [1, 1]
        close(made for made, _ in outcomes)


# A rank refuses its call


def refusals(old, refuses, seed=None):
    """Ranks call until they have a group. A rank in `refuses` refuses that number of its first calls, before they are
    shown or at the end. Returns the errors of each rank's calls."""

    def calls(rank):
        choose, failures = random.Random(f"{seed} {rank}"), list[str]()
        while len(failures) < 12:
            if seed is not None:
                time.sleep(choose.choice((0, 0, 1e-4, 1e-3, 5e-3)))
            try:
                if len(failures) >= refuses.get(rank, 0):
                    shrunk(old[rank], frozenset()).close()
                    return failures
                error = ResourceError(f"rank {rank} refuses call {len(failures)}")
                if seed is None or choose.random() < 0.7:
                    refused(old[rank], error)
                else:
                    shrunk(old[rank], frozenset(), before_end=partial(fail, error)).close()
            except TricommError as failed:
                failures.append(str(failed))
        return failures

    return in_threads(len(old), calls)


def refused(control, error):
    """A call that is refused before it is shown."""
    with closing(Shrink(control, frozenset(), Deadline(10.0))) as part:
        part.give_up(error)
        raise error


def fail(error):
    raise error


def once(outcomes):
    """Whether no error has failed two calls of one rank."""
    assert all(isinstance(failures, list) for failures in outcomes), outcomes
    return all(len(set(failures)) == len(failures) < 12 for failures in outcomes)


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_error_fails_one_call_of_each_rank(world_size):
    seed = random.randrange(1 << 32)
    for turn in range(30):
        with nothing_left(), pages(world_size) as old:
            refuses = {rank: (turn + rank) % 3 for rank in range(world_size)}
            outcomes = refusals(old, refuses, seed + turn)
            assert once(outcomes), (seed, turn, outcomes)


def told_late(patch):
    """Rank 0's next call begins once rank 1's first one has heard its refusal, and looks at that one before and after
    it has failed; then rank 1's next one begins."""
    give_up, agree, agreed = Shrink.give_up, Shrink.agree, Shrink._agreed
    heard, shown, looked = threading.Event(), threading.Event(), threading.Event()

    def giving_up(part, error):
        if part._rank == 1 and part._mine.number == 1:
            heard.set()
            assert shown.wait(10)
        return give_up(part, error)

    def agreeing(part):
        assert part._mine.number == 1 or (looked if part._rank else heard).wait(10)
        agree(part)

    def looks(part):
        over = part._control.page(1).step == PHASES + Phase.WITHDRAWN
        try:
            return agreed(part)
        finally:
            if part._rank == 0:
                shown.set()
                if over:
                    looked.set()

    patch.setattr(Shrink, "give_up", giving_up)
    patch.setattr(Shrink, "agree", agreeing)
    patch.setattr(Shrink, "_agreed", looks)


def test_a_refusal_that_is_told_late_fails_no_next_call(monkeypatch):
    told_late(monkeypatch)
    with nothing_left(), pages(2) as old:
        assert refusals(old, {0: 1}) == [["rank 0 refuses call 0"]] * 2


def test_without_attempts_a_refusal_that_is_told_late_fails_a_next_call(monkeypatch):
    told_late(monkeypatch)
    monkeypatch.setattr(Shrink, "_hear", lambda part, peer, theirs, out: theirs.failed and part._raise_as(peer, theirs))
    with pages(2) as old:
        assert not once(refusals(old, {0: 1}))


@pytest.mark.parametrize("shown", [True, False])
def test_without_errors_that_are_shown_a_next_call_hears_one_of_before(shown, monkeypatch):
    """Two calls of rank 0 fail before the first of rank 1 does."""
    looked, agreed = threading.Event(), Shrink._agreed
    with pages(2) as old:
        for rank in (0, 0, 1):
            with closing(Shrink(old[rank], frozenset(), Deadline(10))) as part:
                if rank and not shown:
                    part._records = tuple
                part.give_up(ResourceError("no memory"))

        def looks(part):
            assert part._rank or looked.wait(10)
            try:
                return agreed(part)
            finally:
                looked.set()

        def calls(rank):
            assert rank or looked.wait(10)
            return shrunk(old[rank], frozenset(), 2.0)

        monkeypatch.setattr(Shrink, "_agreed", looks)
        made = in_threads(2, calls)
        assert all_or_none(made) is shown
        close(made)


def test_a_rank_that_waits_for_a_next_call_is_told_why_the_last_one_failed():
    with nothing_left(), pages(2) as old:
        for rank, why in enumerate(("no time", "no memory")):
            with pytest.raises(ResourceError):
                refused(old[rank], ResourceError(why))
        with pytest.raises(
            CollectiveTimeout, match=r"rank\(s\) \[1\] did not call .*rank 1's last call failed: no memory"
        ):
            shrunk(old[0], frozenset(), 0.3)
