"""User kernels: they end by the group's limits at any wait, and flags order the accesses of two ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import attempt, communicator
from tests.core.bodies.user_kernel import exchanges, polls, weaker_flag
from tricomm.kernels.launch import triton_adapter

KINDS = {"dies": "PeerDied", "late": "CollectiveTimeout", "leaves": "PeerDied"}


def waits(rank, world_size, tell, url, fault, how):
    """Rank 0's kernel waits while rank 1 dies, does not respond, or leaves. Returns the error's kind and text, its
    seconds, and whether this process still computes."""
    with communicator(rank, world_size, url, timeout=2.5, stall_timeout=30.0) as comm:
        w, out = comm.symmetric((3,), torch.int64), torch.zeros(2, dtype=torch.int64)
        comm.barrier()
        if rank == 1:
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "late":
                time.sleep(5.0)
            return None
        if how == "flag":
            outcome = attempt(lambda: comm.launch(exchanges, 1, comm.group_table, w.peers, out, 1, RANK=0, OTHER=1))
        else:
            outcome = attempt(lambda: comm.launch(polls, 1, w.local, HOW=how))
    return *outcome, tricomm.simulate(lambda comm: comm.all_reduce(torch.ones(1)).item(), 2)


@pytest.mark.parametrize(
    ("fault", "how"),
    [("dies", how) for how in ("load", "atomic", "flag")] + [("late", "load"), ("late", "flag"), ("leaves", "load")],
)
def test_a_kernel_that_waits_ends_by_the_groups_limits(fault, how, url):
    with ranks.start(2, waits, url, fault, how) as started:
        kind, text, seconds, alive = started.results()[0].value
    assert kind == KINDS[fault], text
    assert seconds < 2.5 + 1.0 + ranks.BUSY and alive == [2.0, 2.0]
    assert "rank 1" in text or fault == "late"


@pytest.mark.parametrize("how", ["load", "volatile load", "atomic", "cas", "stores", "arithmetic"])
def test_a_kernel_is_interrupted_at_any_wait(how, url):
    options = tricomm.Options(arena_bytes=256 * 1024, timeout=0.5)
    with tricomm.init(url, 0, 1, "cpu", options=options) as comm:
        word = comm.symmetric((1,), torch.int64)
        with pytest.raises(
            tricomm.CollectiveTimeout, match=r"timeout after 0.5 s.*rank 0 was in launch\(polls\); `tricomm"
        ):
            comm.launch(polls, 1, word.local, HOW=how)
    assert triton_adapter.interrupt is None


def many_flags(rank, world_size, tell, url):
    with communicator(rank, world_size, url) as comm:
        w, seen = comm.symmetric((3,), torch.int64), []
        for number in range(1, 30):
            out = torch.full((2,), -1)
            comm.launch(exchanges, 1, comm.group_table, w.peers, out, number, RANK=rank, OTHER=1 - rank)
            seen.append(out.tolist())
        comm.barrier()
        return seen


def test_flags_order_the_accesses_of_two_ranks(url):
    want = [[[10 * n + 1 - rank, 0] for n in range(1, 30)] for rank in (0, 1)]
    assert ranks.run(2, many_flags, url) == want


def calls(comm):
    w, out = comm.symmetric((3,), torch.int64), torch.full((2, 2), -1)
    for number in (1, 2):
        args = (comm.group_table, w.peers, out[number - 1], number)
        comm.launch(exchanges, 1, *args, RANK=comm.rank, OTHER=1 - comm.rank)
    comm.launch(exchanges, 1, comm.group_table, w.peers, out[1], 3, RANK=comm.rank, OTHER=1 - comm.rank)
    return out


@pytest.mark.parametrize("compiled", [None, "sm_90"])
def test_flags_under_the_explorer(compiled):
    for rank, out in enumerate(tricomm.simulate(calls, 2, compiled=compiled)):
        assert out.tolist() == [[11 - rank, 0], [31 - rank, 0]]
    report = tricomm.check(calls, 2, schedules=8, compiled=compiled, keep_going=True)
    assert {finding.kind for finding in report.findings} <= {"leftover"}  # the last round's acknowledgement


@pytest.mark.parametrize(("barrier", "release"), [(True, True), (True, False), (False, True)])
def test_a_flag_without_its_barrier_or_its_release_is_a_race(barrier, release):
    def fn(comm):
        w, out = comm.symmetric((3,), torch.int64), torch.zeros(1, dtype=torch.int64)
        names = {"RANK": comm.rank, "OTHER": 1 - comm.rank, "BARRIER": barrier, "RELEASE": release}
        comm.launch(weaker_flag, 1, comm.group_table, w.peers, out, **names)
        return out

    report = tricomm.check(fn, 2, schedules=8)
    assert {finding.kind for finding in report.findings} == (set() if barrier and release else {"race"})


@pytest.mark.parametrize("compiled", [None, "sm_90"])
def test_a_flag_of_a_rank_that_fails_ends_the_wait(compiled):
    def fn(comm):
        w, out = comm.symmetric((3,), torch.int64), torch.full((2,), -1)
        if comm.rank == 1:
            raise ValueError("no")
        with pytest.raises(tricomm.PeerDied):
            comm.launch(exchanges, 1, comm.group_table, w.peers, out, 1, RANK=0, OTHER=1)
            comm.synchronize()
        return out

    with pytest.raises(ValueError, match="no"):
        tricomm.simulate(fn, 2, compiled=compiled)


def test_a_flag_is_an_int64_word():
    def fn(comm):
        w = comm.symmetric((3,), torch.int32)
        comm.launch(exchanges, 1, comm.group_table, w.peers, torch.zeros(2), 1, RANK=0, OTHER=0)

    with pytest.raises(Exception, match="int64"):
        tricomm.simulate(fn, 1)
