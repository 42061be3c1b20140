"""Faults on the connections of a c10d group, what many groups cost, and what a fork leaves."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests import ranks
from tests.c10d.bodies import connection_bodies as bodies
from tests.c10d.test_endings import BEGIN
from tests.c10d.test_groups import free_port
from tricomm import threads

ROOT = Path(__file__).parents[2]
FORK = """
import signal
from tricomm.store.tcp.transport import Transport
if sys.argv[4] == "unhooked":
    Transport._forked = lambda transport: None
signal.alarm(60)
began, child = time.monotonic(), os.fork()
if child == 0:
    try:
        dist.all_reduce(x)
    except tricomm.GroupAborted as error:
        assert sys.argv[4] == "unhooked" or "parent" in str(error)
    sys.exit(0)
while os.waitpid(child, os.WNOHANG)[0] == 0:
    if time.monotonic() - began > 15:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("killed")
        break
    time.sleep(0.01)
else:
    print("ended")
dist.all_reduce(x)
assert x[0] == 4
dist.barrier()
dist.destroy_process_group()
"""


def survivors(url, hurt, timeout, way, unwatched=False, victim=2, limit=60.0):
    """What the others say when `hurt` is done to one of 3 ranks, 0.3 s into their call."""
    with ranks.start(3, bodies.survivor, url, timeout, way, unwatched, victim, timeout=limit) as started:
        pids = started.messages()
        time.sleep(0.3)
        if hurt is not None:
            os.kill(pids[victim], hurt)
        others = [rank for rank in range(3) if rank != victim]
        outcomes = started.results(others)
    for rank in others:
        assert outcomes[rank].error is None, outcomes[rank]
    return pids, [outcomes[rank].value for rank in others]


@pytest.mark.parametrize("way", ["all_reduce", "async", "next", "recv", "send", "any"])
def test_a_killed_peer_is_named_at_once(way, url):
    pids, results = survivors(url, signal.SIGKILL, 20.0 if way != "any" else 3.0, way)
    for kind, text, seconds in results:
        # Another rank might still send to any rank that asks: the dead one is named when the time is up.
        assert kind == "PeerDied" and f"[2] (pid {pids[2]}) has ended" in text, text
        assert seconds < 5.0 + 3.0 * (way == "any")
        assert way.replace("async", "all_reduce").replace("next", "all_reduce").replace("any", "recv from any") in text


def test_a_killed_peer_is_named_without_a_store():
    pids, results = survivors(f"tcp://127.0.0.1:{free_port()}", signal.SIGKILL, 20.0, "all_reduce", victim=0)
    for kind, text, seconds in results:
        assert kind == "PeerDied" and f"[0] (pid {pids[0]}) has ended" in text, text
        assert seconds < 5.0


def test_a_stopped_peer_is_called_stopped(url):
    pids, results = survivors(url, signal.SIGSTOP, 3.0, "all_reduce")
    for kind, text, seconds in results:
        assert kind == "PeerStalled" and f"rank 2 (pid {pids[2]}) is stopped" in text, text
        assert 2.0 < seconds < 8.0


def test_a_peer_that_never_comes_is_named_when_the_time_is_up(url):
    _, results = survivors(url, None, 2.0, "barrier")
    for kind, text, seconds in results:
        assert kind == "CollectiveTimeout" and "timed out" in text and "rank(s) [2] have not come" in text, text
        assert 1.0 < seconds < 5.5


def test_a_wait_that_does_not_look_at_the_time_has_no_end(url):
    with pytest.raises(TimeoutError):
        survivors(url, None, 2.0, "barrier", unwatched=True, limit=10.0)


@pytest.mark.parametrize(
    "how, kind, words, within",
    [
        ("destroys", "PeerDied", "rank 2 (pid {pid}) has left", 3.0),
        ("exits", "PeerDied", "has ended", 3.0),
        ("interrupted", "GroupAborted", "rank 2 was stopped by KeyboardInterrupt", 4.0),
        ("fails", "GroupAborted", "rank 2 has no more data", 3.0),
    ],
)
def test_a_peer_that_goes_is_heard_before_a_slow_one_comes(how, kind, words, within, url):
    with ranks.start(3, bodies.leaves, url, how) as started:
        first, late, gone = started.results()
        pid = started.pids[2]
    assert first.value[0] == kind and words.format(pid=pid) in first.value[1], first
    assert first.value[2] < within
    assert late.value[0] in (kind, "PeerDied"), late
    assert gone.value is None or gone.value[0] in ("left", "KeyboardInterrupt"), gone
    assert how != "interrupted" or gone.value[2] < 3.0


def test_a_peer_that_went_after_its_part_is_no_fault(url):
    assert ranks.run(3, bodies.finished_first, url) == [True, True, True]


def test_a_lack_of_descriptors_is_named_on_all_ranks(url):
    results = ranks.run(3, bodies.few_descriptors, url, True)
    assert len({count for _, count in results}) == 1, results
    for (kind, text, seconds), _ in results:
        assert kind == "ResourceError" and seconds < 5.0, text
        for words in ("rank 1 (pid", "RLIMIT_NOFILE", "ulimit -n", "needs 2 descriptors", "destroy groups"):
            assert words in text


@pytest.mark.soak
def test_without_the_count_a_lack_of_descriptors_is_told_less_well(url):
    results = ranks.run(3, bodies.few_descriptors, url, False, timeout=120)
    assert any(outcome[0] != "ResourceError" for outcome, _ in results), results


def test_threads_do_not_grow_with_groups(url):
    for results in ranks.run(3, bodies.many_groups, url, 30, timeout=120):
        assert results["descriptors"] == 60 and results["after"][1] <= 0
        assert results["threads"] <= 3 and results["after"][0] <= 3, results


@pytest.mark.parametrize("how, ends", [("hooked", True), ("unhooked", False)])
def test_a_forked_child_ends_at_once_and_the_group_goes_on(how, ends, fresh, tmp_path):
    for code, out, said in fresh.run(tmp_path, BEGIN + FORK, f"file://{tmp_path}/store", "gloo", how):
        assert (code == 0 and out.strip() == "ended") == ends, out + said


@pytest.mark.parametrize("turn", range(2))
def test_an_interrupt_among_asynchronous_calls_is_heard_at_once(turn, tmp_path):
    tmp_path.chmod(0o700)
    (kind, raised), *others = ranks.run(4, bodies.interrupted_among_others, f"file://{tmp_path}/store")
    assert kind == "ZeroDivisionError"
    for kind, heard in others:
        assert kind in ("GroupAborted", "PeerDied") and heard - raised < 10.0, kind


def test_a_moment_that_needs_many_threads_does_not_keep_them():
    def helpers():
        return sum(thread.name == "tricomm-helper" for thread in threading.enumerate())

    hold = threading.Event()
    jobs = [threads.HelperTask(lambda: hold.wait(30) and None) for _ in range(threads._SPARE + 6)]
    assert helpers() >= threads._SPARE + 6
    hold.set()
    assert all(job.wait(30) for job in jobs)
    end = time.monotonic() + 30
    while helpers() > threads._SPARE and time.monotonic() < end:
        time.sleep(0.01)
    assert helpers() == threads._SPARE
