"""Nothing hangs: a killed, stopped, late or diverging rank is a named error on the others; nothing is left behind."""

import os
import random
import signal
import time

import pytest

from tests import ranks
from tests.core.bodies import fault_bodies as bodies
from tests.soak.growth import orphans
from tricomm.kernels.collectives import registry

REDUCTIONS = [(k.algorithm, k.protocol) for k in registry.of("all_reduce", 2)]


def survivors(started, victim):
    return [outcome for rank, outcome in enumerate(started.results()) if rank != victim]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("algorithm", "protocol"), REDUCTIONS, ids=lambda v: v)
def test_a_killed_rank_is_named_by_all_others_within_two_seconds(algorithm, protocol, world_size, url):
    victim = random.randrange(world_size)
    with ranks.start(world_size, bodies.endless, url, algorithm, protocol, {}) as started:
        pids = started.messages()
        time.sleep(random.uniform(0, 0.7))
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        for outcome in survivors(started, victim):
            kind, text, caught, _, left = outcome.value
            assert kind == "PeerDied", text
            assert f"rank {victim} (pid {pids[victim]}) died" in text and "sequence" in text and "all_reduce" in text
            assert caught - killed < 2.0 + ranks.BUSY
            assert left == {}


def test_a_stopped_rank_is_called_stopped_if_the_call_has_the_shorter_limit(url):
    with ranks.start(2, bodies.endless, url, None, None, {"timeout": 3.0, "stall_timeout": 60.0}) as started:
        pids = started.messages()
        os.kill(pids[1], signal.SIGSTOP)
        try:
            kind, text, *_ = _result(started, 0)
            assert kind == "PeerStalled", text
            assert f"rank 1 (pid {pids[1]}) is stopped; timeout after 3 s" in text
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert _result(started, 1)[0] in ("PeerStalled", "GroupAborted", "PeerDied", "CollectiveTimeout")


def test_a_stopped_rank_is_named_within_its_limit_and_not_early(url):
    limit = 1.5
    with ranks.start(3, bodies.endless, url, None, None, {"stall_timeout": limit}) as started:
        pids = started.messages()
        time.sleep(0.3)
        os.kill(pids[2], signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            for rank in (0, 1):
                kind, text, caught, last, left = _result(started, rank)
                assert kind == "PeerStalled", text
                assert f"rank 2 (pid {pids[2]})" in text
                assert limit * 0.5 < caught - stopped < limit + 1.0 + ranks.BUSY
                assert left == {}
        finally:
            os.kill(pids[2], signal.SIGCONT)
        kind, text, *_ = _result(started, 2)
        assert kind in ("PeerStalled", "GroupAborted", "PeerDied"), text


def _result(started, rank):
    while True:
        kind, value = started.pipes[rank].recv() if started.pipes[rank].poll(60) else ("late", None)
        if kind == "end":
            assert value.error is None, (value.error, value.text)
            return value.value
        assert kind == "tell", f"rank {rank} said nothing in 60 s"


@pytest.mark.parametrize("how", ["collective", "count", "dtype", "op", "algorithm", "barrier"])
def test_different_calls_are_named_on_every_rank(how, url):
    for kind, text, seconds in ranks.run(3, bodies.diverges, url, how):
        assert kind == "CollectiveMismatch", text
        assert seconds < 1.0 + ranks.BUSY
        assert "all_reduce" in text and "rank 2" in text and "sequence 21" in text
        other = {"collective": "all_gather", "count": "count=9", "dtype": "int32", "op": "max", "barrier": "barrier"}
        assert other.get(how, "two_shot") in text


def test_a_rank_that_never_comes_is_named(url):
    limit = 1.5
    *waiting, late = ranks.run(3, bodies.absent, url, limit)
    for kind, text, seconds in waiting:
        assert kind in ("CollectiveTimeout", "GroupAborted"), text
        assert "rank 2" in text and "has not entered sequence 2" in text
        assert limit * 0.5 < seconds < limit + 1.0 + ranks.BUSY
    assert any(kind == "CollectiveTimeout" for kind, _, _ in waiting)
    assert late[0] == "GroupAborted", late


@pytest.mark.parametrize("how", ["close", "return", "exit"])
def test_a_rank_that_left_is_named(how, url):
    with ranks.start(3, bodies.leaves, url, how) as started:
        outcomes = started.results()
    for outcome in outcomes[:2]:
        kind, text, seconds = outcome.value
        assert kind == "PeerDied" and "rank 2" in text, text
        assert ("died" if how == "exit" else "closed") in text
        assert seconds < 2.0 + ranks.BUSY


def test_ctrl_c_ends_this_rank_and_tells_the_others(url):
    with ranks.start(2, bodies.interrupted, url) as started:
        pids = started.messages()
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGINT)
        interrupted = time.monotonic()
        assert _result(started, 0)[0] == "KeyboardInterrupt"
        assert time.monotonic() - interrupted < 10
        kind, text = _result(started, 1)
        assert kind == "GroupAborted" and "rank 0 was stopped by KeyboardInterrupt" in text


def test_close_during_another_threads_call_is_an_error_and_no_crash(url):
    text, closed = ranks.run(2, bodies.closes_in_a_call, url)
    assert closed == "closed" and "closed the group during a call" in text


def test_two_launches_that_overlap_are_named_at_once_on_every_rank(url):
    for text, seconds in ranks.run(2, bodies.beside_a_replay, url):
        assert (
            "two launches of this communicator overlapped" in text and seconds < 5.0 + ranks.BUSY
        )  # the timeout is 60


def test_symmetric_beside_another_call_is_a_mismatch_on_both(url):
    for kind, text, seconds in ranks.run(2, bodies.symmetric_alone, url):
        assert kind == "CollectiveMismatch" and "symmetric" in text and "all_reduce" in text, text
        assert seconds < 1.0 + ranks.BUSY


def test_a_job_that_is_stopped_as_a_whole_blames_nobody(url):
    with ranks.start(2, bodies.all_stopped, url) as started:
        pids = started.messages()
        for how in (signal.SIGSTOP, signal.SIGCONT):
            time.sleep(1.0)
            for pid in pids:
                os.kill(pid, how)
        assert [_result(started, rank) for rank in range(2)] == ["fine"] * 2


def test_a_monitor_that_fails_is_a_named_fault_on_all_ranks(url):
    for text in ranks.run(2, bodies.broken_monitor, url):
        assert "rank 0's monitor failed" in text


def test_the_survivors_make_a_new_communicator(url, tmp_path):
    with ranks.start(3, bodies.makes_another, url, f"file://{tmp_path}/next", [0, 2]) as started:
        pids = started.messages()
        time.sleep(0.3)
        os.kill(pids[1], signal.SIGKILL)
        outcomes = started.results()
    assert [outcomes[0].value, outcomes[2].value] == [("PeerDied", 2.0)] * 2


def test_a_killed_job_leaves_nothing_behind(url):
    before = set(os.listdir("/dev/shm"))
    with ranks.start(3, bodies.endless, url, None, None, {}) as started:
        pids = started.messages()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        started.results()
    assert [name for name in orphans(before) if not name.startswith("soak-")] == []  # other tests leave those


@pytest.mark.parametrize("kind", ["all_reduce", "send"])
def test_a_rank_that_cannot_load_a_kernel_tells_those_that_wait_in_it(kind, url):
    told, failed = ranks.run(2, bodies.cannot_load, url, kind)
    assert failed[0] == "ResourceError" and "CUDA_ERROR_OUT_OF_MEMORY" in failed[1] and "the group is lost" in failed[1]
    assert told[0] == "GroupAborted" and "cuModuleLoadData on cuda:1 failed" in told[1]
    assert told[2] < 2.0 + ranks.BUSY
