"""Ranks agree on a generation with any keys of earlier processes in the store, and learn of ranks that abort."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from tricomm.c10d.capabilities import _own_capabilities
from tricomm.errors import InvalidArgument, PeerDied, RendezvousError, TricommError
from tricomm.options import Options
from tricomm.store import process
from tricomm.store.bounded_store import BoundedStore, server_is_gone
from tricomm.store.generation import Generation
from tricomm.store.records import Capabilities

_OWN = partial(_own_capabilities, Options())


class Plain(Store):
    """A store with only the methods that every store has."""

    def __init__(self) -> None:
        super().__init__()
        self._store = HashStore()

    def set(self, key, value):
        self._store.set(key, bytes(value))

    def get(self, key):
        return self._store.get(key)

    def add(self, key, amount):
        return self._store.add(key, amount)

    def check(self, keys):
        return self._store.check(keys)

    def multi_get(self, keys):
        return self._store.multi_get(keys)


@pytest.fixture
def child():
    """A sleeping process: its facts, in the form that a rank's have, and the process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as popen:
        yield replace(_own_capabilities(Options()), pid=popen.pid, start_time=process.start_time(popen.pid)), popen
        popen.kill()


def agree(store, rank, timeout=10.0, own=_OWN, known=None, world_size=2):
    one = Generation(store, "test", Capabilities, rank, world_size, timeout, known)
    one.agree(own)
    return one


def attempt(store, rank, *args, **given):
    try:
        return agree(store, rank, *args, **given)
    except TricommError as error:
        return error


def both(store, *args, **given):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: attempt(store, rank, *args, **given), range(2)))


def leave_record(store, rank, body):
    """Leave the keys of a process of `rank` that was killed before its peer joined."""
    one = Generation(store, "test", Capabilities, rank, 2, 5.0)
    store.set(f"tricomm/test/rank/{rank}", one._record(body).pack(None))


def names(results):
    assert all(isinstance(one, Generation) for one in results), results
    return {one.name for one in results}


@pytest.mark.parametrize("kind", [HashStore, Plain, FileStore])
def test_the_names_of_generations_are_unique(kind, tmp_path):
    store = kind(str(tmp_path / "store"), 2) if kind is FileStore else kind()
    found = [names(both(store)) for _ in range(3)]
    assert all(len(one) == 1 for one in found) and len(set.union(*found)) == 3


@pytest.mark.parametrize("first", [0, 1])
def test_keys_of_killed_processes_are_not_taken_for_a_rank(first, child):
    store, (body, popen) = HashStore(), child
    popen.kill()
    popen.wait()
    for rank in range(2):
        leave_record(store, rank, body)
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(attempt, store, first)
        time.sleep(0.8)  # longer than until an ended process is named
        assert not early.done()
        assert len(names([attempt(store, 1 - first), early.result()])) == 1


def test_a_rank_that_died_when_all_were_connected_is_not_taken_for_its_successor(child):
    store, (body, popen) = HashStore(), child
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(attempt, store, 1, own=lambda: body)
        one = attempt(store, 0)
    assert len(names([one, other.result()])) == 1
    one.settle()
    popen.kill()  # it has not deleted its record
    popen.wait()
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(attempt, store, 0)
        time.sleep(0.8)  # longer than until an ended process is named
        assert not early.done()
        assert len(names([attempt(store, 1), early.result()])) == 1


def test_a_rank_that_ends_is_named_at_once_and_only_then(child):
    store, (body, popen) = HashStore(), child
    leave_record(store, 1, body)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(attempt, store, 0, 30.0)
        time.sleep(0.8)
        assert not waiting.done()
        popen.kill()
        popen.wait()
        ended = time.monotonic()
        error = waiting.result()
    assert isinstance(error, PeerDied) and f"[1] (pid {body.pid}) has ended" in str(error)
    assert time.monotonic() - ended < 5
    # The next attempt recognises that record and waits for another process.
    error = attempt(store, 0, 1.0)
    assert isinstance(error, RendezvousError) and f"pid {body.pid}, which was rank 1 before, has ended" in str(error)
    assert len(names(both(store))) == 1


def test_without_the_check_of_processes_only_the_limit_ends_the_wait(child, monkeypatch):
    store, (body, popen) = HashStore(), child
    monkeypatch.setattr(process, "state", lambda pid, started: None)
    leave_record(store, 1, body)
    popen.kill()
    popen.wait()
    error = attempt(store, 0, 1.5)
    assert isinstance(error, RendezvousError) and "[1] did not come" in str(error)


def test_a_known_process_that_exits_before_it_joins_is_named(child):
    body, popen = child
    popen.kill()
    popen.wait()
    began = time.monotonic()
    error = attempt(HashStore(), 0, 30.0, known={1: body})
    assert isinstance(error, PeerDied) and time.monotonic() - began < 5


def refused():
    raise InvalidArgument("TRICOMM_X=5 makes no sense")


def test_a_rank_that_joins_later_gets_the_reason_of_an_abort_once():
    store = HashStore()
    assert isinstance(attempt(store, 1, own=refused), InvalidArgument)
    for _ in range(2):
        began = time.monotonic()
        error = attempt(store, 0, 1.5)
        took = time.monotonic() - began
        assert isinstance(error, RendezvousError) and ("TRICOMM_X=5" in str(error)) == (took < 1.0), error
    assert took > 1.0
    assert len(names(both(store))) == 1


def test_a_rank_that_timed_out_does_not_disturb_a_later_attempt():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(attempt, store, 1, 10.0, world_size=3)
        early = attempt(store, 0, 0.5, world_size=3)
        assert isinstance(early, RendezvousError) and "rank(s) [2] did not come" in str(early)
        again, third = (pool.submit(attempt, store, rank, 10.0, world_size=3) for rank in (0, 2))
        assert len(names([again.result(), late.result(), third.result()])) == 1


def test_a_second_process_with_this_rank_is_named():
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(attempt, store, 1, 10.0)
        time.sleep(0.3)
        agreed = both(store)
        assert "says that it is rank 1, and so does this one" in str(first.result())
    assert len(names(agreed)) == 1


def test_keys_are_deleted_with_their_group_or_by_the_next_one():
    store = HashStore()
    lost = both(store)
    for one in lost:
        one.settle()
        one.store.set("reason", "lost")
    before = store.num_keys()
    for _ in range(3):
        made = both(store)
        for one in made:
            one.store.set("x", "y")
        for one in reversed(made):
            one.settle()
        assert not store.check([f"tricomm/test/{lost[0].name}/reason"])
        for one in made:
            one.end()
        assert store.num_keys() < before
    assert store.list_keys() == []


def test_the_ranks_of_a_generation_learn_of_its_abort():
    store = HashStore()
    first, second = both(store)
    second.give_up(PeerDied("the process of rank(s) [7] has ended"))
    with pytest.raises(PeerDied, match="aborted by rank 1 of 2 .*rank.s. .7. has ended"):
        first.gather("addresses", b"")
    assert len(names(both(store))) == 1


def test_a_read_does_not_wait_for_a_key():
    bounded = BoundedStore(HashStore(), 5.0)
    assert bounded.read("x") is None
    bounded.set("x", b"\0\xff")
    assert bounded.read("x") == b"\0\xff" and bounded.keys() == ["x"]
    bounded.delete("x")
    assert bounded.read("x") is None and bounded.keys() == []
    bounded.close()
    plain = BoundedStore(Plain(), 5.0)
    plain.set("x", b"1")
    plain.delete("x")
    assert plain.read("x") == b"1" and plain.read("y") is None and plain.keys() == []
    plain.close()


def test_probing_a_stores_server_leaves_it_working():
    store = PrefixStore("a", TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20)))
    for n in range(1, 30):
        assert not server_is_gone(store)
        with closing(BoundedStore(store, 20.0)) as calls:
            assert calls.add("count", 1) == n
