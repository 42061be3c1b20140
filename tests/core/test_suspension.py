"""Memory given back and taken again at the same addresses, by real processes on a CPU."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tests import ranks
from tests.core.bodies import suspension_bodies as bodies
from tricomm.options import Tuning

EMPTY = {"fds": [], "maps": [], "threads": []}


def test_memory_goes_and_comes_back_at_the_same_addresses(url):
    for result, left in ranks.run(3, bodies.and_left, bodies.round_trip, url, 2):
        assert result["wrong"] == []
        assert left == EMPTY
        before, asleep, before_2, asleep_2 = result["pages"]
        assert before and before_2 and asleep == asleep_2 == 0
        for name, text in result["said"].items():
            assert text.startswith("InvalidArgument: ") and "suspended" in text and "resume()" in text, (name, text)
        assert result["forked"] == 0
        assert "not suspended" in result["awake"] and "suspended" in result["explained"]
        assert [(m.kind, m.nbytes > 0, m.suspended) for m in result["stats"]] == [
            ("posix_shm", False, True),
            ("posix_shm", True, False),
        ] * 2


def test_a_rank_that_dies_while_all_sleep_is_noticed_and_named(url):
    with ranks.start(3, bodies.and_left, bodies.one_dies, url, 1) as started:
        pids = started.messages()
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        for rank, outcome in enumerate(started.results([0, 2])):
            if rank == 1:
                continue
            (noticed, when, texts), left = outcome.value
            assert when - killed < 2.0 + ranks.BUSY
            for text in (noticed, *texts):
                assert text.startswith("PeerDied") and f"rank 1 (pid {pids[1]}) died" in text, text
            assert left == EMPTY


@pytest.mark.parametrize("where", ["give_back", "take_again"])
def test_a_rank_that_dies_in_the_middle_is_named_and_leaves_nothing(where, url):
    with ranks.start(3, bodies.and_left, bodies.dies_in, url, where) as started:
        *others, victim = started.results()
        assert victim.code == 7
        for outcome in others:
            [(kind, text)], left = outcome.value
            assert kind == "PeerDied" and "rank 2" in text
            assert left == EMPTY


@pytest.mark.parametrize("where", ["give_back", "take_again"])
def test_refused_on_one_rank_is_refused_on_all(where, url):
    for texts, suspended, pages, wrong in ranks.run(2, bodies.memory_refused, url, where, 1):
        text = texts[-1]
        assert text.startswith("ResourceError") and "rank 1" in text and "made to fail" in text
        assert suspended == (where == "take_again") and ("not suspended" in text) == (where == "give_back")
        assert pages == 0 and wrong == []


def test_bad_moments_are_refused_by_name_on_all_ranks(url):
    (first, wrong), (second, wrong_too) = ranks.run(2, bodies.bad_moments, url)
    assert wrong == wrong_too == []
    for said in (first, second):
        assert "rank 0: rank(s) [1] have not received all" in said[0]
        assert "rank 0 has no symmetric handle open, rank 1 has symmetric handles [1] open" in said[1]
        assert "suspend" in said[2] and "all_reduce" in said[2]


def test_a_message_that_keeps_a_rank_from_it_is_named(url):
    waits, receiver = ranks.run(2, bodies.beside_a_message, url)
    for said in (waits, receiver):
        assert "rank(s) [1] did not come although their processes run; rank 1 is in recv from rank 0 (tag 7," in said
    assert waits.startswith("CollectiveTimeout") and receiver.startswith("GroupAborted")


def _beside_a_call(comm):
    """Rank 0 suspends while rank 1 is in a call."""
    try:
        comm.suspend() if comm.rank == 0 else comm.all_reduce(torch.ones(3))
    except tricomm.TricommError as error:
        return type(error).__name__, str(error)


def test_a_call_that_one_rank_has_not_made_is_named_at_once():
    options = tricomm.Options(arena_bytes=1 << 18, timeout=1e6)
    (kind, text), (other, theirs) = tricomm.simulate(_beside_a_call, 2, options=options)
    assert kind == other == "CollectiveMismatch"
    for said in (text, theirs):
        assert "suspend: rank 1 is in all_reduce" in said and "at sequence 1 instead" in said


SMALL = tricomm.Options(arena_bytes=256 << 10, _tuning=Tuning(blocks=2, tile=16))


def _sleeps(comm, begin=True):
    results = []
    for turn in range(3):
        x = torch.arange(20.0) + comm.rank + turn
        comm.all_reduce(x)
        results.append(torch.equal(x, 2 * torch.arange(20.0) + 1 + 2 * turn))
        if not begin:
            comm._group.begin = lambda: None
        comm.suspend()
        comm.resume()
    return results


def test_simulated_ranks_sleep_too_and_no_schedule_shows_a_race():
    assert tricomm.simulate(_sleeps, 2, options=SMALL) == [[True] * 3] * 2
    assert tricomm.check(_sleeps, 2, schedules=3, options=SMALL).ok


def test_without_a_fresh_start_the_next_call_goes_wrong():
    with pytest.raises(tricomm.TricommError):
        tricomm.simulate(lambda comm: _sleeps(comm, begin=False), 2, options=SMALL)


def test_without_the_look_of_the_monitor_a_death_in_sleep_shows_at_the_next_call_only():
    store, result, looked = HashStore(), [], threading.Barrier(2)

    def rank(number):
        with tricomm.Communicator(store, number, 2, "cpu", 30.0, SMALL) as comm:
            comm.suspend()
            if number == 0:
                monitor = comm._monitor
                for suspended in (False, True):
                    monitor.suspended = suspended
                    monitor._control.alive = lambda peer: False
                    monitor.look(0.02)
                    result.append(monitor.fault)
            looked.wait(30.0)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    without, with_it = result
    assert without is None and with_it.kind == "PeerDied" and "rank 1" in with_it.text
