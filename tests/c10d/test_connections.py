"""Faults on the connections of a c10d group, what many groups cost, and what a fork leaves."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group, of, same
from tests.c10d.test_endings import BEGIN
from tests.core.bodies.common_bodies import attempt
from tests.store.store_ranks import free_port
from tricomm import threads
from tricomm.deadline import poll
from tricomm.store.tcp import set_up, waits

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


def after_one_that_is_not_waited_for():
    first = dist.all_reduce(torch.ones(3), async_op=True)
    while not first.is_completed():
        time.sleep(0.01)
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def survivor(rank, world_size, tell, url, timeout, way, unwatched=False, victim=2):
    """Wait in a call for rank `victim`, which the test kills or stops."""
    if unwatched:
        waits.Wait.look = lambda waiting: None
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "next": after_one_that_is_not_waited_for,
        "async": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(torch.ones(3), victim),
        "send": lambda: dist.send(torch.ones(1 << 22), victim),
        "any": lambda: dist.recv(torch.ones(3)),
    }
    with default_group(rank, world_size, url, timeout=timeout) as world:
        dist.barrier()
        tell(os.getpid())
        if rank == victim:
            time.sleep(60)
        outcome = attempt(calls[way])
        lost = attempt(lambda: world.allreduce([torch.ones(3)]))
        assert lost[0] == "GroupAborted" and "lost" in lost[1], lost
    return outcome


def survivors(url, hurt, timeout, way, unwatched=False, victim=2, limit=60.0):
    """Send the signal `hurt` to one of 3 ranks 0.3 s into their call; return the outcomes of the other two."""
    with ranks.start(3, survivor, url, timeout, way, unwatched, victim, timeout=limit) as started:
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
        # Another rank might still send, so a receive from any rank names the dead one only at its timeout.
        assert kind == "PeerDied" and f"[2] (pid {pids[2]}) has ended" in text, text
        assert seconds < 5.0 + 3.0 * (way == "any")
        assert way.replace("async", "all_reduce").replace("next", "all_reduce").replace("any", "recv from any") in text


def test_a_killed_peer_is_named_without_a_store():
    pids, results = survivors(f"tcp://127.0.0.1:{free_port()}", signal.SIGKILL, 20.0, "all_reduce", victim=0)
    for kind, text, seconds in results:
        assert kind == "PeerDied" and f"[0] (pid {pids[0]}) has ended" in text, text
        assert seconds < 5.0


def test_a_stopped_peer_is_reported_as_stopped(url):
    pids, results = survivors(url, signal.SIGSTOP, 3.0, "all_reduce")
    for kind, text, seconds in results:
        assert kind == "PeerStalled" and f"rank 2 (pid {pids[2]}) is stopped" in text, text
        assert 2.0 < seconds < 8.0


def test_a_peer_that_never_calls_is_named_at_the_timeout(url):
    _, results = survivors(url, None, 2.0, "barrier")
    for kind, text, seconds in results:
        assert kind == "CollectiveTimeout" and "timed out" in text and "rank(s) [2] have not come" in text, text
        assert 1.0 < seconds < 5.5


def test_without_the_deadline_a_wait_never_returns(url):
    with pytest.raises(TimeoutError):
        survivors(url, None, 2.0, "barrier", unwatched=True, limit=10.0)


def leaves(rank, world_size, tell, url, how):
    """The last rank leaves while rank 0 waits; rank 1 calls 5 s late, and rank 0 must notice before that."""
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    dist.barrier()
    if rank == world_size - 1:
        time.sleep(0.5)
        if how == "destroys":
            dist.destroy_process_group()
            time.sleep(6)
        elif how == "interrupted":
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            began = time.monotonic()
            try:
                dist.recv(torch.ones(1), 0)
            except KeyboardInterrupt:
                return "KeyboardInterrupt", "", time.monotonic() - began
        elif how == "fails":
            dist.group.WORLD._dispatcher.abort_waits(tricomm.GroupAborted("rank 2 has no more data"))
            time.sleep(2)
        return "left", "", 0.0
    if rank == 1:
        time.sleep(5)
    return attempt(lambda: dist.all_reduce(torch.ones(3)))


@pytest.mark.parametrize(
    "how, kind, words, within",
    [
        ("destroys", "PeerDied", "rank 2 (pid {pid}) has left", 3.0),
        ("exits", "PeerDied", "has ended", 3.0),
        ("interrupted", "GroupAborted", "rank 2 was stopped by KeyboardInterrupt", 4.0),
        ("fails", "GroupAborted", "rank 2 has no more data", 3.0),
    ],
)
def test_a_peer_that_leaves_is_noticed_before_a_slow_one_calls(how, kind, words, within, url):
    with ranks.start(3, leaves, url, how) as started:
        first, late, gone = started.results()
        pid = started.pids[2]
    assert first.value[0] == kind and words.format(pid=pid) in first.value[1], first
    assert first.value[2] < within
    assert late.value[0] in (kind, "PeerDied"), late
    assert gone.value is None or gone.value[0] in ("left", "KeyboardInterrupt"), gone
    assert how != "interrupted" or gone.value[2] < 3.0


@ranks.each(3, True)
def test_a_peer_that_leaves_after_its_part_is_no_fault(rank, world_size, tell, url):
    os.environ["TRICOMM_CHECK"] = "0"
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    dist.barrier()
    if rank == 1:
        time.sleep(3)
    x = of(rank, (1000,))
    dist.broadcast(x, 0)
    return same(x, of(0, (1000,)))


def few_descriptors(rank, world_size, tell, url, checked):
    if not checked:
        set_up._check_descriptors = lambda generation, name: None
    with default_group(rank, world_size, url, timeout=20.0):
        groups = [dist.new_group()]
        if rank == 1:
            used = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 24, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        outcome = ("nothing", "", 0.0)
        for _ in range(20):
            # torch itself waits for as long as this for ranks that do not come out of a new group
            outcome = attempt(lambda: groups.append(dist.new_group(timeout=timedelta(seconds=3))))
            if outcome[0] != "nothing":
                break
        for group in groups if checked else []:
            x = torch.ones(2)
            dist.all_reduce(x, group=group)
            assert x[0] == world_size
        return outcome, len(groups)


def test_a_lack_of_descriptors_is_named_on_all_ranks(url):
    results = ranks.run(3, few_descriptors, url, True)
    assert len({count for _, count in results}) == 1, results
    for (kind, text, seconds), _ in results:
        assert kind == "ResourceError" and seconds < 5.0, text
        for words in ("rank 1 (pid", "RLIMIT_NOFILE", "ulimit -n", "needs 2 descriptors", "destroy groups"):
            assert words in text


@pytest.mark.soak
def test_without_the_count_the_error_does_not_name_the_lack_of_descriptors(url):
    results = ranks.run(3, few_descriptors, url, False, timeout=120)
    assert any(outcome[0] != "ResourceError" for outcome, _ in results), results


def _threads():
    return len(os.listdir("/proc/self/task"))


def many_groups(rank, world_size, tell, url, count):
    """Count the threads and descriptors that `count` groups add to a process, before and after they are destroyed."""
    with default_group(rank, world_size, url):
        x = torch.ones(2)
        dist.all_reduce(x)
        threads, files = _threads(), len(os.listdir("/proc/self/fd"))
        groups = [dist.new_group() for _ in range(count)]
        for number, group in enumerate(groups):
            y = of(rank, (4,), call=number)
            dist.all_reduce(y, group=group)
            assert same(y, sum(of(r, (4,), call=number) for r in range(world_size)))
        more = _threads() - threads, len(os.listdir("/proc/self/fd")) - files
        dist.barrier()
        for group in groups:
            dist.destroy_process_group(group)
        del groups, group
        gc.collect()
        dist.barrier()
        time.sleep(0.2)
        after = _threads() - threads, len(os.listdir("/proc/self/fd")) - files
    return more, after


def test_threads_do_not_grow_with_groups(url):
    for (tasks, descriptors), after in ranks.run(3, many_groups, url, 30, timeout=120):
        assert descriptors == 60 and after[1] <= 0
        assert tasks <= 3 and after[0] <= 3, (tasks, after)


@ranks.each(2, True)
def test_idle_helpers_hold_no_descriptors(rank, world_size, tell, url):
    """Whether a burst of asynchronous calls leaves no descriptor, although its helpers stay."""
    with default_group(rank, world_size, url):
        groups = [dist.new_group() for _ in range(4)]
        dist.all_reduce(torch.ones(3))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            works = [dist.all_reduce(torch.ones(30_000), group=group, async_op=True) for group in groups]
            for work in works:
                work.wait()
        let_go = poll(lambda: len(os.listdir("/proc/self/fd")) <= before, 20.0, 0.01)
        return let_go and bool(threads._helpers)


@pytest.mark.parametrize("how, ends", [("hooked", True), ("unhooked", False)])
def test_a_forked_child_exits_at_once_and_the_group_still_works(how, ends, fresh, tmp_path):
    for code, out, said in fresh.run(tmp_path, BEGIN + FORK, f"file://{tmp_path}/store", "gloo", how):
        assert (code == 0 and out.strip() == "ended") == ends, out + said


def interrupted_among_others(rank, world_size, tell, url):
    with default_group(rank, world_size, url, timeout=20.0):
        dist.all_reduce(torch.ones(3))
        if rank == 0:
            signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
            signal.setitimer(signal.ITIMER_REAL, 0.4)
        try:
            while True:
                for work in [dist.all_reduce(torch.ones(100), async_op=True) for _ in range(3)]:
                    work.wait()
        except (ZeroDivisionError, tricomm.TricommError) as error:
            return type(error).__name__, time.monotonic()


@pytest.mark.parametrize("turn", range(2))
def test_peers_learn_of_an_interrupt_among_asynchronous_calls_at_once(turn, tmp_path):
    tmp_path.chmod(0o700)
    (kind, raised), *others = ranks.run(4, interrupted_among_others, f"file://{tmp_path}/store")
    assert kind == "ZeroDivisionError"
    for kind, heard in others:
        assert kind in ("GroupAborted", "PeerDied") and heard - raised < 10.0, kind
