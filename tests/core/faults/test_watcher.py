"""One thread watches all groups of a process: busy ones in every round, idle ones in turn."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import FileStore, PrefixStore, TCPStore

import tricomm
from tests import forked, ranks
from tests.core.bodies.common_bodies import OWN, SMALL, attempt, leftovers, more_than
from tests.store.store_ranks import free_port, succeed
from tricomm.core.watch.watcher import Watcher
from tricomm.store import process


class Group:
    """The part of a monitor that a watcher uses."""

    def __init__(self, busy=False, wrong=False):
        self.stopped, self.looked = False, 0.0
        self.is_busy, self.wrong, self.looks, self.beats = busy, wrong, 0, 0

    def busy(self):
        return self.is_busy

    def beat(self):
        self.beats += 1

    def look(self, tick):
        assert not self.stopped and 0 <= tick <= 0.25
        self.looks += 1


def watched(groups, seconds, ended=lambda: 0):
    result = Watcher(ended)
    for group in groups:
        result.add(group)
    time.sleep(seconds)
    names = [thread.name for thread in threading.enumerate()]
    for group in groups:
        result.discard(group)
    return names


def test_one_thread_watches_all_groups_and_ends_with_the_last():
    before = [thread.name for thread in threading.enumerate()]
    groups = [Group() for _ in range(100)] + [Group(busy=True)]
    names = watched(groups, 3.0)
    assert sorted(names) == sorted([*before, "tricomm-watcher"])
    assert [thread.name for thread in threading.enumerate()] == before
    assert all(group.looks >= 2 and group.beats >= 5 for group in groups)
    assert groups[-1].looks > 5 * max(group.looks for group in groups[:-1])


def test_every_group_is_checked_at_once_when_a_process_exits():
    gone, groups, result = [], [Group() for _ in range(300)], Watcher(lambda: len(gone))
    for group in groups:
        result.add(group)
    gone.append("one")
    end = time.monotonic() + 5.0
    while time.monotonic() < end and not all(group.looks for group in groups):
        time.sleep(0.01)
    least = min(group.looks for group in groups)
    for group in groups:
        result.discard(group)
    assert least == 1 and sum(group.looks for group in groups) < 2 * len(groups)


def test_a_discarded_group_is_no_longer_watched():
    class Slow(Group):
        looking = False

        def look(self, tick):
            self.looking = True
            time.sleep(0.2)
            self.looking = False

    slow, other, result = Slow(busy=True), Group(), Watcher(lambda: 0)
    result.add(slow)
    result.add(other)
    while not slow.looking:
        time.sleep(0.001)
    result.discard(slow)
    assert not slow.looking
    result.discard(other)


def make(rank, world_size, store, name):
    store = PrefixStore(name, store)
    return tricomm.Communicator(store, rank, world_size, "cpu", options=tricomm.Options(**SMALL))


def many(rank, world_size, tell, folder, count, limit):
    """More communicators than this process may open files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    store, sums = FileStore(f"{folder}/store", world_size), []
    comms = [make(rank, world_size, store, str(n)) for n in range(count)]
    for n, comm in enumerate(comms):
        x = torch.full((1,), rank + 1 + n, dtype=torch.int32)
        comm.all_reduce(x)
        sums.append(x.item())
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    descriptors = len(os.listdir("/proc/self/fd"))
    comms[0].barrier()
    busy, began = time.process_time(), time.monotonic()
    time.sleep(2.0)
    idle = (time.process_time() - busy) / (time.monotonic() - began)
    comms[0].barrier()
    for comm in comms:
        comm.close()
    return threads, descriptors, sums, idle


def test_hundreds_of_communicators_with_few_descriptors_and_one_thread(tmp_path):
    """Threads or descriptors for each communicator would exceed the limit."""
    tmp_path.chmod(0o700)
    for threads, descriptors, sums, idle in ranks.run(2, many, str(tmp_path), 100, 64):
        assert threads == ["tricomm-watcher"]
        assert descriptors <= 64
        assert sums == [3 + 2 * n for n in range(100)]
        assert idle < 0.25  # of a core; 0.01 to 0.02 on an idle machine


def many_lose_a_peer(rank, world_size, tell, folder, count):
    store = FileStore(f"{folder}/store", world_size)
    comms = [make(rank, world_size, store, str(n)) for n in range(count)]
    comms[0].barrier()
    tell(os.getpid() if rank else "ready")
    kinds, slowest = set(), 0.0
    if rank:
        time.sleep(60.0)
    time.sleep(1.0)
    for comm in comms:
        began = time.monotonic()
        try:
            comm.all_reduce(torch.ones(3))
        except tricomm.TricommError as error:
            kinds.add(type(error).__name__)
        slowest = max(slowest, time.monotonic() - began)
        comm.close()
    return kinds, slowest


def test_a_killed_peer_is_named_by_every_idle_group(tmp_path):
    tmp_path.chmod(0o700)
    with ranks.start(2, many_lose_a_peer, str(tmp_path), 60) as started:
        pid = started.message(1)
        assert started.message(0) == "ready"
        os.kill(pid, 9)
        kinds, slowest = started.results()[0].value
    assert kinds == {"PeerDied"} and slowest < 2.0 + ranks.BUSY


def without_descriptors(rank, world_size, tell, poor, port):
    seconds = timedelta(seconds=20)
    store = TCPStore("127.0.0.1", port, world_size, rank == 0, seconds, wait_for_workers=False)
    with make(rank, world_size, store, "warm") as comm:
        comm.barrier()
    before = leftovers()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == poor:
        lowest = os.open("/dev/null", os.O_RDONLY)  # the limit is on descriptor numbers: from here on open fails
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    kind, text, took = attempt(lambda: make(rank, world_size, store, "poor").close())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = more_than(before, *OWN)
    with make(rank, world_size, store, "after") as comm:
        x = torch.full((1,), rank + 1)
        comm.all_reduce(x)
        comm.barrier()
        return kind, text, took, left, x.item()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_without_descriptors_is_named_on_all_ranks(rank):
    results = ranks.run(3, without_descriptors, rank, free_port())
    for kind, text, seconds, left, after in results:
        assert kind == "ResourceError" and f"rank {rank}" in text, text
        assert "open files" in text and "ulimit -n" in text
        assert seconds < 10.0 and left == {} and after == 6


FORKING = """
import os, sys, time
import torch, tricomm
from tricomm.core.watch.watcher import WATCHER
{broken}
options = tricomm.Options(arena_bytes=262144)
comm = tricomm.init("file://" + sys.argv[1] + "/store", 0, 1, "cpu", options=options)
comm.all_reduce(torch.ones(3))
child = os.fork()
if child == 0:
    assert not WATCHER._watched, "the parent's groups are watched in the child"
    with tricomm.init("file://" + sys.argv[1] + "/own", 0, 1, "cpu", options=options) as own:
        own.all_reduce(torch.ones(3))
        assert WATCHER._thread.is_alive() and len(WATCHER._watched) == 1
    sys.exit(7)
began = time.monotonic()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
seconds = time.monotonic() - began
comm.all_reduce(torch.ones(3))
assert WATCHER._thread.is_alive()
comm.close()
print(status, seconds < 15)
"""


def forking(tmp_path, broken=""):
    tmp_path.chmod(0o700)
    environment = {**os.environ, "TRICOMM_STATS": "1", "TRICOMM_STATS_DIR": str(tmp_path / "stats")}
    script = FORKING.format(broken=broken)
    return forked.script("-c", script, str(tmp_path), env=environment)


def test_a_forked_child_exits_at_once_and_the_parent_still_works(tmp_path):
    done = forking(tmp_path)
    assert done.stdout.split() == ["7", "True"], done.stderr
    assert len(list((tmp_path / "stats").glob("*.json"))) >= 1


def test_without_the_check_for_forks_a_child_watches_its_parents_groups(tmp_path):
    done = forking(tmp_path, "WATCHER.__class__.__init__ = lambda self: None")
    assert "the parent's groups are watched in the child" in done.stderr


def test_threads_check_one_process_at_the_same_time():
    """The watcher and a rank that sets up a group share the check of a peer's process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        peer = process.watch(child.pid, process.start_time(child.pid))

        def look(_):
            for _ in range(3000):
                assert peer.alive()

        succeed(6, look)
        child.stdin.close()
        child.wait()
        assert not peer.alive()
