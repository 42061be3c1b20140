"""Nothing hangs: a killed, stopped, late or diverging rank is a named error on the others, and frees its memory."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import SMALL, attempt, communicator, endless
from tests.soak.growth import orphans
from tricomm.core.group import PROCESSES
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry

REDUCTIONS = [(k.algorithm, k.protocol) for k in registry.of("all_reduce", 2)]


def survivors(started, victim):
    return [outcome for rank, outcome in enumerate(started.results()) if rank != victim]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("algorithm", "protocol"), REDUCTIONS, ids=lambda v: v)
def test_a_killed_rank_is_named_by_all_others_within_two_seconds(algorithm, protocol, world_size, url):
    victim = random.randrange(world_size)
    with ranks.start(world_size, endless, url, algorithm, protocol, {}) as started:
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


def test_a_stopped_rank_is_reported_as_stopped_if_the_call_has_the_shorter_limit(url):
    with ranks.start(2, endless, url, None, None, {"timeout": 3.0, "stall_timeout": 60.0}) as started:
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
    with ranks.start(3, endless, url, None, None, {"stall_timeout": limit}) as started:
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


def absent(rank, world_size, tell, url, limit):
    """The last rank is running but makes no call."""
    with communicator(rank, world_size, url, timeout=limit) as comm:
        comm.barrier()
        if rank == world_size - 1:
            time.sleep(limit + 1.5)
        return attempt(lambda: comm.all_reduce(torch.ones(3)))


def test_a_rank_that_never_calls_is_named(url):
    limit = 1.5
    *waiting, late = ranks.run(3, absent, url, limit)
    for kind, text, seconds in waiting:
        assert kind in ("CollectiveTimeout", "GroupAborted"), text
        assert "rank 2" in text and "has not entered sequence 2" in text
        assert limit * 0.5 < seconds < limit + 1.0 + ranks.BUSY
    assert any(kind == "CollectiveTimeout" for kind, _, _ in waiting)
    assert late[0] == "GroupAborted", late


def leaves(rank, world_size, tell, url, how):
    """The last rank closes or exits; the others go on calling."""
    with communicator(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(4))
        comm.barrier()
        if rank == world_size - 1:
            time.sleep(0.2)  # until the others have left the barrier
            return os._exit(0) if how == "exit" else None
        return attempt(lambda: [comm.all_reduce(torch.ones(4)) for _ in iter(int, 1)])


@pytest.mark.parametrize("how", ["close", "exit"])
def test_a_rank_that_left_is_named(how, url):
    with ranks.start(3, leaves, url, how) as started:
        outcomes = started.results()
    for outcome in outcomes[:2]:
        kind, text, seconds = outcome.value
        assert kind == "PeerDied" and "rank 2" in text, text
        assert ("died" if how == "exit" else "closed") in text
        assert seconds < 2.0 + ranks.BUSY


def closes_in_a_call(rank, world_size, tell, url):
    """Another thread closes the group while this one waits: an error, not a crash."""
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
    comm.barrier()
    if rank == 1:
        time.sleep(2.0)
        comm.close()
        return "closed"
    threading.Timer(0.5, comm.close).start()
    try:
        comm.all_reduce(torch.ones(4))
    except tricomm.GroupAborted as error:
        time.sleep(0.5)
        return str(error)


def test_close_during_another_threads_call_is_an_error_and_no_crash(url):
    text, closed = ranks.run(2, closes_in_a_call, url)
    assert closed == "closed" and "closed the group during a call" in text


def beside_a_replay(rank, world_size, tell, url):
    """Rank 0's launch finds another launch of its communicator running; rank 1 makes no call."""
    with communicator(rank, world_size, url) as comm:
        began = time.monotonic()
        try:
            comm.all_reduce(torch.ones(4))  # the other rank may lose the group before this one has returned
            if rank == 0:
                comm.group_table[layout.EPOCHS] |= 12345 << 32  # as the kernel of a replayed graph sets it
                comm.all_reduce(torch.ones(4))
            while time.monotonic() < began + 30.0:
                comm.check()
                time.sleep(0.01)
        except tricomm.GroupAborted as error:
            return str(error), time.monotonic() - began


def test_two_launches_that_overlap_are_named_at_once_on_every_rank(url):
    for text, seconds in ranks.run(2, beside_a_replay, url):
        assert (
            "two launches of this communicator overlapped" in text and seconds < 5.0 + ranks.BUSY
        )  # the timeout is 60


def all_stopped(rank, world_size, tell, url):
    """Make calls while the whole job is stopped and continued."""
    with communicator(rank, world_size, url, stall_timeout=0.6) as comm:
        comm.barrier()
        tell(os.getpid())
        end = time.monotonic() + 5.0
        more = torch.ones(1, dtype=torch.int32)
        while more[0]:
            more = torch.tensor([int(time.monotonic() < end)], dtype=torch.int32)
            comm.all_reduce(more, op="min")
        return "fine"


def test_a_job_that_is_stopped_as_a_whole_blames_no_rank(url):
    with ranks.start(2, all_stopped, url) as started:
        pids = started.messages()
        for how in (signal.SIGSTOP, signal.SIGCONT):
            time.sleep(1.0)
            for pid in pids:
                os.kill(pid, how)
        assert [_result(started, rank) for rank in range(2)] == ["fine"] * 2


def broken_monitor(rank, world_size, tell, url):
    """A monitor that fails reports it, and the next call is not left unwatched."""
    with communicator(rank, world_size, url) as comm:
        if rank == 0:
            comm._monitor._peers = None
            time.sleep(0.3)
        try:
            for _ in range(100):
                comm.all_reduce(torch.ones(3))
        except tricomm.GroupAborted as error:
            return str(error)


def test_a_monitor_that_fails_is_a_named_fault_on_all_ranks(url):
    for text in ranks.run(2, broken_monitor, url):
        assert "rank 0's monitor failed" in text


def makes_another(rank, world_size, tell, url, other, survivors):
    """After a fault the same processes make a new communicator."""
    with communicator(rank, world_size, url) as comm:
        comm.barrier()
        tell(os.getpid())
        try:
            while True:
                comm.all_reduce(torch.ones(10))
        except tricomm.TricommError as error:
            kind = type(error).__name__
    if rank not in survivors:
        return kind, None
    with communicator(survivors.index(rank), len(survivors), other) as comm:
        x = torch.ones(10)
        comm.all_reduce(x)
        return kind, x[0].item()


def test_the_survivors_make_a_new_communicator(url, tmp_path):
    with ranks.start(3, makes_another, url, f"file://{tmp_path}/next", [0, 2]) as started:
        pids = started.messages()
        time.sleep(0.3)
        os.kill(pids[1], signal.SIGKILL)
        outcomes = started.results()
    assert [outcomes[0].value, outcomes[2].value] == [("PeerDied", 2.0)] * 2


def test_a_killed_job_leaves_no_resources(url):
    before = set(os.listdir("/dev/shm"))
    with ranks.start(3, endless, url, None, None, {}) as started:
        pids = started.messages()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        started.results()
    assert [name for name in orphans(before) if not name.startswith("soak-")] == []  # may be left by other tests


def cannot_load(rank, world_size, tell, url, kind):
    """Rank 1 cannot load the kernel of a call that rank 0 waits in."""
    bind = PROCESSES.bind

    def refuse(kernel, *arguments, **keywords):
        if kind in kernel.fn.__name__:
            raise tricomm.ResourceError("cuModuleLoadData on cuda:1 failed: CUDA_ERROR_OUT_OF_MEMORY")
        return bind(kernel, *arguments, **keywords)

    if rank == 1:
        PROCESSES.bind = refuse
    with communicator(rank, world_size, url) as comm:

        def calls():
            comm.barrier()  # rank 0 may still wait in it when rank 1, which has left it, aborts the group
            if kind == "all_reduce":
                comm.all_reduce(torch.ones(4))
            else:
                comm.recv(torch.ones(4), 1) if rank == 0 else comm.send(torch.ones(4), 0)

        return attempt(calls)


@pytest.mark.parametrize("kind", ["all_reduce", "send"])
def test_a_rank_that_cannot_load_a_kernel_tells_those_that_wait_in_it(kind, url):
    told, failed = ranks.run(2, cannot_load, url, kind)
    assert failed[0] == "ResourceError" and "CUDA_ERROR_OUT_OF_MEMORY" in failed[1] and "the group is lost" in failed[1]
    assert told[0] == "GroupAborted" and "cuModuleLoadData on cuda:1 failed" in told[1]
    assert told[2] < 2.0 + ranks.BUSY
