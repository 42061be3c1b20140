"""Groups made after faults of earlier ones, and ranks that are slow or stopped for a while without a fault."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import communicator, endless, leftovers, more_than


def after_a_stop(rank, world_size, tell, url, other, limit, seconds):
    """Ranks 0 and 1 lose the stopped rank 2 and make a group without it; rank 2 is resumed meanwhile."""
    comm = tricomm.init(
        url, rank, world_size, "cpu", options=tricomm.Options(arena_bytes=256 * 1024, stall_timeout=limit)
    )
    comm.barrier()
    tell(os.getpid())
    seen = torch.zeros(1000)
    try:
        while True:
            seen = torch.full((1000,), float(rank + 1))
            comm.all_reduce(seen)
    except tricomm.TricommError as error:
        kind = type(error).__name__
    kept = seen.clone()
    if rank == 2:
        comm.close()
        return kind, 0, True
    wrong, turn = 0, torch.ones(1, dtype=torch.int32)
    with communicator(rank, 2, other) as pair:
        tell("goes on")
        end = time.monotonic() + seconds
        while turn[0]:
            x = torch.arange(1000.0) + rank
            pair.all_reduce(x)
            wrong += int((x != 2 * torch.arange(1000.0) + 1).sum())
            turn = torch.tensor([int(time.monotonic() < end)], dtype=torch.int32)
            pair.all_reduce(turn, op="min")
    comm.close()
    return kind, wrong, torch.equal(seen, kept)


def test_a_rank_that_continues_after_a_stop_does_not_disturb_its_peers(url, tmp_path):
    limit = 1.5
    with ranks.start(3, after_a_stop, url, f"file://{tmp_path}/next", limit, 2.0) as started:
        pids = started.messages()
        time.sleep(0.3)
        os.kill(pids[2], signal.SIGSTOP)
        try:
            assert [started.message(rank) for rank in (0, 1)] == ["goes on"] * 2
        finally:
            os.kill(pids[2], signal.SIGCONT)
        outcomes = started.results()
    assert [outcome.error for outcome in outcomes] == [None] * 3, [outcome.text for outcome in outcomes]
    for kind, wrong, untouched in (outcomes[0].value, outcomes[1].value):
        assert kind == "PeerStalled" and wrong == 0 and untouched
    assert outcomes[2].value[0] in ("GroupAborted", "PeerStalled", "PeerDied")


def holds_the_lock(rank, world_size, tell, url, limit, seconds, times):
    """The last rank runs C code that holds the GIL while the others wait for it."""
    results = []
    with communicator(rank, world_size, url, stall_timeout=limit) as comm:
        comm.barrier()
        for turn in range(times):
            if rank == world_size - 1:
                ran = threading.Event()
                thread = threading.Thread(target=ran.set)
                began = time.monotonic()
                any(
                    map((began + seconds).__lt__, iter(time.monotonic, None))
                )  # one call into C, which does not release the GIL
                results.append(time.monotonic() - began >= seconds)
                thread.start()
                thread.join(5.0)
            x = torch.full((5,), float(rank + turn))
            comm.all_reduce(x)
            results.append(x[0].item() == sum(r + turn for r in range(world_size)))
    return results


GAP = 0.02  # seconds: the interval of heartbeats


@pytest.mark.parametrize(
    ("limit", "seconds", "times"), [(3.0, 50 * GAP, 3), (1.0, 4.0, 1)], ids=["below", "beyond the limit"]
)
def test_a_busy_interpreter_is_not_reported_as_a_stall(limit, seconds, times, url):
    """The GIL is held for many heartbeats."""
    for result in ranks.run(2, holds_the_lock, url, limit, seconds, times):
        assert result and all(result)


def many_lives(rank, world_size, tell, url, closed, aborted):
    """Make `closed` groups over one store, then `aborted` ones that end in a mismatch; return the resources left."""
    before = None
    for life in range(closed):
        with communicator(rank, world_size, url) as comm:
            x = torch.full((100,), float(rank + life))
            comm.all_reduce(x)
            assert x[0] == sum(r + life for r in range(world_size)), life
        before = leftovers() if life == 1 else before
    for _ in range(aborted):
        comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(arena_bytes=256 * 1024))
        try:
            comm.all_reduce(torch.ones(3 + rank))
        except tricomm.CollectiveMismatch:
            comm.close()
        else:
            raise AssertionError("calls of different sizes went through")
    comm = None
    return more_than(before)


@pytest.mark.parametrize(
    ("closed", "aborted"), [(20, 5), pytest.param(200, 50, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])]
)
def test_many_groups_one_after_another_leave_nothing(closed, aborted, url):
    assert ranks.run(2, many_lives, url, closed, aborted, timeout=900) == [{}, {}]


def dropped(rank, world_size, tell, url, count):
    """Drop communicators without closing them; return the resources left a moment later."""
    before, options = leftovers(), tricomm.Options(arena_bytes=256 * 1024)
    for _ in range(count):
        comm = tricomm.init(url, rank, world_size, "cpu", options=options)
        x = torch.ones(3)
        comm.all_reduce(x)
        del comm
    gc.collect()
    end = time.monotonic() + 5.0
    while (more := more_than(before)) and time.monotonic() < end:
        time.sleep(0.02)
    return more


def test_a_dropped_communicator_frees_its_memory(url):
    assert ranks.run(2, dropped, url, 3) == [{}, {}]


def test_after_a_killed_job_the_next_one_joins_over_the_same_file(url):
    with ranks.start(3, endless, url, None, None, {}) as started:
        pids = started.messages()
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
        started.results()
    assert ranks.run(3, many_lives, url, 2, 0) == [{}] * 3
