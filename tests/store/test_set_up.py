"""Any number of groups over one store: after restarts, after faults, and after a death at any step."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
import time
import types
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import ROUTES, default_group
from tests.core.bodies.common_bodies import attempt
from tricomm.c10d import capabilities, fallback_backends
from tricomm.c10d.process_group import TricommGroup
from tricomm.core import bootstrap
from tricomm.store import handshake
from tricomm.store.control import ControlPage
from tricomm.store.generation import Generation
from tricomm.store.tcp import set_up
from tricomm.store.tcp.transport import Transport

VICTIM = 1
# A rank dies right before one of these calls. At the steps of `UNKNOWN` its peers do not know its process yet.
UNKNOWN = {
    "before it has read the store": (Generation, "agree", 1),
    "before it has a record": (capabilities, "_own_capabilities", 1),
}
STEPS = UNKNOWN | {
    "with a record": (Generation, "_complete", 1),
    "with a digest": (Generation, "_unconfirmed", 2),
    "when all agree": (fallback_backends, "_connect", 1),
    "before it listens": (set_up, "_listener", 1),
    "with an address": (Generation, "gather", 1),
    "with all addresses": (set_up._Meeting, "__init__", 1),
    "while it connects": (set_up._Meeting, "step", 1),
    "before it says who it is": (set_up._Meeting, "_connected", 1),
    "before it has the answer": (set_up._Meeting, "_read", 1),
    "when it is connected": (set_up._Meeting, "take", 1),
    "in the first exchange": (Transport, "exchange", 1),
    "before it deletes its keys": (Generation, "settle", 1),
    "when it is set up": (TricommGroup, "__init__", 1),
}
KERNELS = {
    "before the kernels' handshake": (bootstrap, "handshake", 1),
    "in the handshake": (handshake._Handshake, "_introduce", 1),
    "when it knows the others": (handshake._Handshake, "_meet", 1),
    "before the handshake is confirmed": (ControlPage, "agree", 1),
    "before it has memory": (bootstrap, "open_arena", 1),
}


def make(store, rank, world_size, timeout):
    """Make a group over `store`, make its first call, and shut it down."""
    group = tricomm.c10d.group_over(store, rank, world_size, timedelta(seconds=timeout))
    try:
        x = torch.full((3,), rank + 1.0)
        group.allreduce([x]).wait()
        group.barrier().wait()
    finally:
        group.shutdown()
    return x.tolist()


def connect(port, route):
    os.environ["TRICOMM_CPU"], os.environ["TRICOMM_ARENA_BYTES"] = route, str(256 * 1024)
    return dist.TCPStore("127.0.0.1", port, None, False)


def survives(place, _, tell, port, route, folder, steps, watched=True):
    """Rank 0 or 2: at each step the ranks make a group, the victim dies, and the group is made again."""
    store, rank, seen = connect(port, route), 2 * place, []
    if not watched:
        Generation.look = Generation.explain = lambda generation: None
    for step in steps:
        limit = 4.0 if step in UNKNOWN or not watched or step not in STEPS | KERNELS else 30.0
        began = time.monotonic()
        kind, text, _ = attempt(lambda limit=limit: make(store, rank, 3, limit))
        died = float((Path(folder) / step).read_text()) if (Path(folder) / step).exists() else began
        seen.append((step, kind, text, time.monotonic() - (began if step in UNKNOWN else died)))
        tell((step, kind, text))
        seen.append((step, "again", "", make(store, rank, 3, 40.0)))
    return seen


def dies(_, __, tell, port, route, folder, before, step):
    """The victim: replaces one that has died, makes the group again, and dies at `step`."""
    store = connect(port, route)
    if before:
        make(store, VICTIM, 3, 40.0)
    if not step:
        return

    def die():
        (Path(folder) / "now").write_text(str(time.monotonic()))
        (Path(folder) / "now").rename(Path(folder) / step)
        os.kill(os.getpid(), signal.SIGKILL)

    if step in STEPS | KERNELS:
        owner, name, number = (STEPS | KERNELS)[step]
        real, left = getattr(owner, name), [number]

        def last(*args, **kwargs):
            left[0] -= 1
            if not left[0]:
                die()
            return real(*args, **kwargs)

        setattr(owner, name, last)
    else:  # "0.012 s": after this time
        threading.Timer(float(step.split()[0]), die).start()
    make(store, VICTIM, 3, 40.0)
    time.sleep(10)


def restarted(rank, world_size, tell, port, route):
    store = connect(port, route)
    dist.init_process_group("tricomm", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    dist.barrier()
    dist.destroy_process_group()
    return x.tolist()


def begins_again(rank, world_size, tell, port, route, times):
    """The number of keys in the store after the first group of the process and after the last one."""
    store, keys = connect(port, route), []
    for turn in range(times):
        dist.init_process_group("tricomm", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        for _ in range(2):
            group = dist.new_group()
            x = torch.full((3,), rank + 1.0)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [3.0] * 3
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        store.add(f"turn/{turn}", 1)
        while store.add(f"turn/{turn}", 0) < world_size:  # all ranks have ended it
            time.sleep(0.002)
        if turn in (0, times - 1):
            keys.append(sorted(key for key in store.list_keys() if "turn" not in key))
        store.add(f"return/{turn}", 1)
        while store.add(f"return/{turn}", 0) < world_size:
            time.sleep(0.002)
    return keys


def stops(rank, world_size, tell, port, limit):
    """Rank 1 is stopped right before it listens, until its peers have timed out."""
    store = connect(port, "gloo")
    real = set_up._listener

    def stopped(*args):
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep {limit + 3}; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
        return real(*args)

    if rank == 1:
        set_up._listener = stopped
    began = time.monotonic()
    kind, text, seconds = attempt(lambda: make(store, rank, world_size, limit))
    return (kind, text, seconds if rank != 1 else time.monotonic() - began - 3)


def ends_before_new_group(rank, world_size, tell, url):
    with default_group(rank, world_size, url, timeout=60.0):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt(dist.new_group)


def strangers(rank, world_size, tell, port, trusting=False):
    """While the ranks connect, strangers connect to rank 0: silent ones, one that sends garbage, one that claims to be
    rank 1 without the key. `trusting`: rank 0 does not compare keys."""
    store, kept = connect(port, "gloo"), []
    real, hello = set_up._Meeting.__init__, set_up._HELLO

    def begin(meeting, own, server, addresses):
        if rank == 0:
            host, at, _ = addresses[0]
            said = [b"", b"GET / HTTP/1.1\r\n" + bytes(100), hello.pack(set_up._MAGIC, 1, bytes(16))]
            said += [b""] * (set_up._STRANGERS + world_size)
            for words in said:
                kept.append(socket.create_connection((host.rstrip(b"\0").decode(), at)))
                kept[-1].sendall(words)
            store.set("strangers", b"")
        store.get("strangers")
        real(meeting, own, server, addresses)

    set_up._Meeting.__init__ = begin
    if trusting:
        set_up.hmac = types.SimpleNamespace(compare_digest=lambda mine, theirs: True)
    return attempt(lambda: make(store, rank, world_size, 5.0))[:2]


def crosswise(rank, world_size, tell, port):
    store, results = connect(port, "gloo"), {}

    def one(name):
        results[name] = make(dist.PrefixStore(name, store), rank, world_size, 30.0)

    threads = [threading.Thread(target=one, args=(name,)) for name in ("ab" if rank else "ba")]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    return [results["a"], results["b"]]


def wrong_interface(rank, world_size, tell, url):
    """Return this rank's error when rank 0's GLOO_SOCKET_IFNAME names no interface."""
    if rank == 0:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    try:
        with default_group(rank, world_size, url, timeout=20.0):
            return "none"
    except tricomm.TricommError as error:
        time.sleep(2 * (rank == 0))  # rank 0 hosts the store
        return f"{type(error).__name__}: {error}"


@pytest.fixture
def server():
    """A store that outlives the ranks, as torchrun's does."""
    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


def walk(server, folder, route, steps, timeout=300.0):
    """The errors of the survivors if rank 1 dies at each of `steps`, and the group is made again with a new process."""
    with ranks.start(2, survives, server.port, route, str(folder), list(steps), timeout=timeout) as others:
        before = ""
        for step in [*steps, ""]:
            with ranks.start(1, dies, server.port, route, str(folder), before, step, timeout=60.0) as victim:
                (outcome,) = victim.results()
            if outcome != ranks.Outcome(code=-signal.SIGKILL if step else None, seconds=outcome.seconds):
                raise AssertionError(f"step {step!r} after {before!r}: {outcome}, {others.results()}")
            if step:
                others.messages()
            before = step
        return others.results()


def check(outcomes):
    for outcome in outcomes:
        assert outcome.error is None, outcome
        for step, kind, text, seen in outcome.value:
            if kind == "again":
                assert seen == [6.0] * 3, step
            elif step in UNKNOWN:
                assert kind == "RendezvousError" and "rank(s) [1] did not come" in text, (step, kind, text)
                assert seen < 5.0 + ranks.BUSY, (step, text, seen)
            else:
                assert "[1] (pid" in text and "has ended" in text or "rank 1 (pid" in text, (step, kind, text)
                assert seen < 2.0 + ranks.BUSY, (step, text, seen)


SHORT = ["with a record", "before it listens", "with all addresses", "while it connects", "when it is set up"]


def test_a_death_in_the_set_up_is_named_and_the_group_made_again(server, tmp_path):
    check(walk(server, tmp_path, "gloo", SHORT))


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ROUTES)
def test_a_death_at_every_step_is_named_and_the_group_made_again(route, server, tmp_path):
    check(walk(server, tmp_path, route, KERNELS if route == "kernels" else [s for s in STEPS if s not in SHORT]))


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
def test_a_death_at_any_moment_is_named_and_the_group_made_again(route, server, tmp_path):
    chance = random.Random(1)
    longest = 0.1 if route == "gloo" else 0.4
    moments = list(dict.fromkeys(f"{chance.uniform(0, longest):.5f} s" for _ in range(100)))
    for outcome in walk(server, tmp_path, route, moments, 1200.0):
        assert outcome.error is None, outcome
        for moment, kind, text, seen in outcome.value:
            if kind == "again":
                assert seen == [6.0] * 3, moment
            elif kind != "nothing":  # the group's calls had completed
                unknown = "rank(s) [1] did not come" in text
                assert unknown or "rank(s) [1] (pid" in text or "rank 1 (pid" in text, (moment, kind, text)
                assert seen < (5.0 if unknown else 2.0) + ranks.BUSY, (moment, text, seen)


def test_without_the_check_of_processes_a_death_is_not_named(server, tmp_path):
    with ranks.start(2, survives, server.port, "gloo", str(tmp_path), SHORT[1:2], False) as others:
        with ranks.start(1, dies, server.port, "gloo", str(tmp_path), "", SHORT[1]) as victim:
            victim.results()
        assert {kind for _, kind, _ in others.messages()} == {"RendezvousError"}


@pytest.mark.parametrize("route", ROUTES)
def test_processes_that_follow_others_over_one_store(route, server):
    keys = []
    for _ in range(3):
        assert ranks.run(2, restarted, server.port, route) == [[3.0] * 3] * 2
        keys.append(sorted(server.list_keys()))
    assert keys[0] == keys[1] == keys[2]


@pytest.mark.parametrize("route", ROUTES)
def test_groups_begin_and_end_again_and_again_in_one_process(route, server):
    first, last = ranks.run(2, begins_again, server.port, route, 6)
    assert first == last and first[0] == first[1]


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
def test_five_hundred_groups_begin_and_end(route, server):
    first, last = ranks.run(2, begins_again, server.port, route, 500, timeout=3600)
    assert first == last and first[0] == first[1]


def test_a_rank_that_is_stopped_while_it_connects_costs_the_limit(server):
    for rank, outcome in enumerate(ranks.run(3, stops, server.port, 3.0)):
        kind, text, seconds = outcome
        assert kind == "RendezvousError" and "timeout after 3 s" in text and "[1]" in text, (rank, outcome)
        assert 2.0 < seconds < 4.0 + ranks.BUSY, (rank, outcome)


def test_a_rank_that_ends_before_a_new_group_is_named_at_once(url):
    with ranks.start(3, ends_before_new_group, url) as started:
        outcomes = started.results([0, 2])
        pid = started.pids[1]
    for rank in (0, 2):
        kind, text, seconds = outcomes[rank].value
        assert kind == "PeerDied" and f"[1] (pid {pid}) has ended" in text and seconds < 2.0 + ranks.BUSY, outcomes


def test_connections_of_strangers_are_refused(server):
    assert ranks.run(3, strangers, server.port) == [("nothing", "")] * 3


def test_without_the_key_a_stranger_is_taken_for_a_rank(server):
    results = ranks.run(3, strangers, server.port, True)
    assert any(kind != "nothing" for kind, _ in results), results


def test_two_threads_make_groups_in_another_order_on_each_rank(server):
    assert ranks.run(2, crosswise, server.port) == [[[3.0] * 3] * 2] * 2


def test_a_rank_without_a_usable_interface_is_named_on_all_ranks(url):
    own, other = ranks.run(2, wrong_interface, url)
    assert own.startswith("InvalidArgument") and "nosuch0" in own and "GLOO_SOCKET_IFNAME" in own and "lo" in own
    assert other.startswith("RendezvousError") and "rank 0" in other and "nosuch0" in other
