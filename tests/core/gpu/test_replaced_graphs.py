"""Graphs captured before `replace` run after it, together with the new rank's. The kernels of each process go through
the launch path of a fake GPU."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import pytest
import torch

from tests import ranks
from tests.core.bodies.replace_bodies import joined
from tests.core.faults.test_shrink import made
from tests.fake_cuda import OnFakeGpu, World
from tricomm import communicator
from tricomm.errors import PeerDied

LOST, SIZES = 1, (8, 1000)


@contextmanager
def on_fake_gpu():
    with pytest.MonkeyPatch.context() as patch:
        world = World()
        world.install(patch)
        patch.setattr(communicator, "PROCESSES", OnFakeGpu(world, 0))
        yield world
        world.verify()


def captured(comm, world):
    """A graph of two calls, and their tensors."""
    tensors = [torch.zeros(size) for size in SIZES]
    for x in tensors:
        comm.all_reduce(x)  # compiled and loaded
    with world.capture(world.new_stream(torch.device("cuda", 0))) as graph:
        for x in tensors:
            comm.all_reduce(x)
    return graph, tensors


def replay(comm, graph, tensors, turn):
    """Replay; other numbers in every turn and on every rank. Calls without a graph before and after it."""
    size = comm.world_size
    for x in tensors:
        x.copy_(torch.arange(len(x)) * (comm.rank + turn))
    for node in graph:
        node()
    for x in tensors:
        assert torch.equal(x, torch.arange(len(x)) * float(sum(range(size)) + size * turn)), turn
    y = comm.all_reduce(torch.full((3,), float(comm.rank + turn)))
    assert y.tolist() == [float(sum(range(size)) + size * turn)] * 3


def stays(rank, world_size, tell, url):
    with on_fake_gpu() as world:
        comm = made(url, rank, world_size)
        graph = captured(comm, world)
        for turn in range(3):
            replay(comm, *graph, turn)
        tell(os.getpid())
        with pytest.raises(PeerDied):
            while True:
                comm.all_reduce(torch.ones(4), async_op=True).wait(20.0)
        comm.replace(LOST)
        more = captured(comm, world)
        for turn in range(5):
            replay(comm, *graph, turn)
            replay(comm, *more, turn + 1)
        comm.close()


def comes(rank, world_size, tell, url, size):
    with on_fake_gpu() as world:
        comm = joined(url, LOST, size)
        graph = captured(comm, world)
        for turn in range(5):
            replay(comm, *graph, turn)
            replay(comm, *graph, turn + 1)
        comm.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_captured_graphs_run_with_the_new_rank(world_size, url):
    with ranks.start(world_size, stays, url) as started:
        os.kill(started.messages()[LOST], signal.SIGKILL)
        with ranks.start(1, comes, url, world_size) as new:
            left = started.results([rank for rank in range(world_size) if rank != LOST])
            assert [(o.error, o.text) for o in new.results()] == [(None, "")]
            assert all(left[rank].error is None for rank in range(world_size) if rank != LOST), left
