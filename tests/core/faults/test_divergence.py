"""Ranks that make different calls: another root, order or grid, an extra call, an empty tensor on one rank."""

from __future__ import annotations

import time

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import attempt, communicator
from tricomm.options import Tuning


def other_grid(rank, world_size, tell, url):
    """One rank forces another grid."""

    def make():
        with communicator(rank, world_size, url, _tuning=Tuning(blocks=2 if rank == world_size - 1 else 1)) as comm:
            comm.all_reduce(torch.ones(8))

    return attempt(make)


def test_another_grid_is_refused_when_the_ranks_meet(url):
    for kind, text, seconds in ranks.run(3, other_grid, url):
        assert kind == "RendezvousError" and "other options" in text, text
        assert seconds < 2.0 + ranks.BUSY


def once_too_often(rank, world_size, tell, url, how, limit):
    """The last rank calls once more than the others, which close the group or live on without a call."""
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(arena_bytes=256 * 1024, timeout=limit))
    for _ in range(3):
        comm.all_reduce(torch.ones(8))
    # A rank that is still in its last call would get the fault of the next one.
    ranks.together(url, rank, range(world_size))
    result = None
    if rank == world_size - 1:
        result = attempt(lambda: comm.all_gather(torch.ones(8)))
    elif how == "live on":
        time.sleep(limit + 1.0)
    comm.close()
    if rank < world_size - 1 and how == "close":
        time.sleep(5.0)  # its process is running, so the last rank only sees that it closed the group
    return result


def test_an_extra_call_is_named_when_the_others_close(url):
    kind, text, seconds = ranks.run(3, once_too_often, url, "close", 30.0)[2]
    assert kind == "PeerDied" and "closed" in text and "all_gather" in text and "sequence 4" in text, text
    assert seconds < 2.0 + ranks.BUSY


def test_an_extra_call_is_named_while_the_others_are_running(url):
    limit = 1.5
    kind, text, seconds = ranks.run(3, once_too_often, url, "live on", limit)[2]
    assert kind == "CollectiveTimeout" and "all_gather" in text and "has not entered sequence 4" in text, text
    assert limit * 0.5 < seconds < limit + 1.0 + ranks.BUSY


def empty_on_one(rank, world_size, tell, url, following, limit):
    """The last rank's tensor is empty: its call does nothing, so its next one is compared with the others' call."""
    odd = rank == world_size - 1
    with communicator(rank, world_size, url, timeout=limit) as comm:
        comm.barrier()
        if odd:
            comm.all_reduce(torch.empty(0))
            if following:
                return attempt(comm.barrier)
            time.sleep(limit + 1.0)
            return None
        return attempt(lambda: comm.all_reduce(torch.ones(8)))


def test_an_empty_tensor_on_one_rank_is_a_call_that_it_does_not_make(url):
    limit = 1.5
    *others, _ = ranks.run(3, empty_on_one, url, False, limit)
    for kind, text, seconds in others:
        assert kind in ("CollectiveTimeout", "GroupAborted") and "has not entered sequence 2" in text, text
        assert "rank 2" in text and limit * 0.5 < seconds < limit + 1.0 + ranks.BUSY
    assert any(kind == "CollectiveTimeout" for kind, _, _ in others)


def test_an_empty_tensor_on_one_rank_and_then_another_call_is_named_at_once(url):
    for kind, text, seconds in ranks.run(3, empty_on_one, url, True, 30.0):
        assert kind == "CollectiveMismatch" and "all_reduce" in text and "barrier" in text, text
        assert seconds < 2.0 + ranks.BUSY


@ranks.each(3, 6.0)
def test_empty_tensors_on_all_ranks_send_nothing_and_the_group_still_works(rank, world_size, tell, url):
    """Nothing is sent, and the next call works; a scalar is one element."""
    with communicator(rank, world_size, url) as comm:
        for shape in ((0,), (3, 0), (0, 4)):
            comm.all_reduce(torch.empty(shape))
            comm.all_gather(torch.empty(shape))
        x = torch.tensor(float(rank + 1))
        return comm.all_reduce(x).item()


def usual(comm):
    comm.all_reduce(torch.ones(8))


# The calls of the other ranks and of the last one, and the words by which the error names each.
DIVERGING = {
    "collective": (usual, lambda comm: comm.all_gather(torch.ones(8)), "all_reduce", "all_gather"),
    "count": (usual, lambda comm: comm.all_reduce(torch.ones(9)), "count=8", "count=9"),
    "dtype": (usual, lambda comm: comm.all_reduce(torch.ones(8, dtype=torch.int32)), "float32", "int32"),
    "op": (usual, lambda comm: comm.all_reduce(torch.ones(8), op="max"), "sum", "max"),
    "algorithm": (usual, lambda comm: comm.all_reduce(torch.ones(8), algorithm="two_shot"), "one_shot", "two_shot"),
    "barrier": (usual, lambda comm: comm.barrier(), "all_reduce", "barrier"),
    "root": (lambda comm: comm.broadcast(torch.ones(8), 0), lambda comm: comm.broadcast(torch.ones(8), 1), "=0", "=1"),
}


def diverges(rank, world_size, tell, url, how):
    """Twenty good calls, then one rank calls something else."""
    with communicator(rank, world_size, url) as comm:
        for _ in range(20):
            usual(comm)
        ranks.together(url, rank, range(world_size))  # a rank still in its last call would get the fault there
        return attempt(lambda: DIVERGING[how][rank == world_size - 1](comm))


@pytest.mark.parametrize("how", DIVERGING)
def test_different_calls_are_named_on_every_rank(how, url):
    for kind, text, seconds in ranks.run(3, diverges, url, how):
        assert kind == "CollectiveMismatch", text
        assert seconds < 1.0 + ranks.BUSY
        assert all(word in text for word in (*DIVERGING[how][2:], "rank 2", "sequence 21")), text
