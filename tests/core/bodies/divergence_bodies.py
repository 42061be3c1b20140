"""Ranks that call different things, or not as often as the others. Module-level, so that a new process can find it."""

from __future__ import annotations

import time

import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import attempt, communicator
from tricomm.options import Tuning


def other_argument(rank, world_size, tell, url, how):
    """One rank names another root; one pair of calls comes in another order."""
    odd = rank == world_size - 1
    with communicator(rank, world_size, url) as comm:
        for _ in range(5):
            comm.all_reduce(torch.ones(8))
        x = torch.ones(8)
        if how == "root":
            return attempt(lambda: comm.broadcast(x, 1 if odd else 0))
        calls = [lambda: comm.all_reduce(x), lambda: comm.all_gather(x)]
        return attempt(calls[1] if odd else calls[0])


def other_grid(rank, world_size, tell, url):
    """One rank forces another grid."""

    def make():
        with communicator(rank, world_size, url, _tuning=Tuning(blocks=2 if rank == world_size - 1 else 1)) as comm:
            comm.all_reduce(torch.ones(8))

    return attempt(make)


def once_too_often(rank, world_size, tell, url, how, limit):
    """The last rank calls once more than the others, which close the group or live on without a call."""
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(arena_bytes=256 * 1024, timeout=limit))
    for _ in range(3):
        comm.all_reduce(torch.ones(8))
    # A rank that is still in its last call would be told of the next one's fault.
    ranks.together(url, rank, range(world_size))
    result = None
    if rank == world_size - 1:
        result = attempt(lambda: comm.all_gather(torch.ones(8)))
    elif how == "live on":
        time.sleep(limit + 1.0)
    comm.close()
    if rank < world_size - 1 and how == "close":
        time.sleep(5.0)  # its process lives: that it closed is all that the last rank can see
    return result


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


def empty_on_all(rank, world_size, tell, url):
    """Nothing is sent, and the next call is as good as any; scalars count as one element."""
    with communicator(rank, world_size, url) as comm:
        for shape in ((0,), (3, 0), (0, 4)):
            comm.all_reduce(torch.empty(shape))
            comm.all_gather(torch.empty(shape))
        x = torch.tensor(float(rank + 1))
        return comm.all_reduce(x).item()
