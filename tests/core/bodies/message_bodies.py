"""What ranks do in the tests of messages between processes."""

from __future__ import annotations

import os
import signal
import time

import torch

from tests.core.bodies.common_bodies import communicator
from tricomm.options import Tuning


def handed_on(rank, world_size, tell, url, protocol):
    """Messages of several pieces round a ring, mixed with collectives; returns what was wrong."""
    wrong = []
    with communicator(rank, world_size, url, _tuning=Tuning(tile=32)) as comm:
        for turn, count in enumerate((1, 2500, 0, 37, 9001)):
            x = torch.arange(count, dtype=torch.int32) * 3 + rank * 1000 + turn
            y = torch.full((count,), -1, dtype=torch.int32)
            to, source = (rank + 1) % world_size, (rank - 1) % world_size
            if rank:
                comm.send(x, to, turn, protocol=protocol)
            result = comm.recv(y, None if turn % 2 else source, turn, protocol=protocol)
            if not rank:
                comm.send(x, to, turn, protocol=protocol)
            if result != source or not torch.equal(y, x + (source - rank) * 1000):
                wrong.append((turn, count))
            total = comm.all_reduce(torch.tensor([rank + turn]))
            wrong += [] if int(total) == sum(range(world_size)) + world_size * turn else [(turn, "sum")]
    return wrong


def left_early(rank, world_size, tell, url):
    """Rank 1 sends and leaves; rank 2 sends later; rank 0 gets both."""
    with communicator(rank, world_size, url) as comm:
        if rank == 1:
            comm.send(torch.arange(7), 0, 5)
            return None
        if rank == 2:
            time.sleep(2.5)  # longer than a group waits for somebody who is gone and needed
            comm.send(torch.arange(7) + 1, 0, 6)
            return None
        time.sleep(0.5)
        results = []
        for source, tag in ((None, 6), (1, 5)):
            y = torch.zeros(7, dtype=torch.int64)
            results.append((comm.recv(y, source, tag), y.tolist()))
        return results


def waited_for(rank, world_size, tell, url, source, how):
    """Rank 0 waits for a message of rank 1, which dies or leaves before it sends one."""
    with communicator(rank, world_size, url) as comm:
        if rank == 1:
            time.sleep(0.3)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return None
        comm.recv(torch.zeros(3), source, 4)
    return None


def of_many_queues(rank, world_size, tell, url):
    """Several blocks, which run one after another here, and one block that takes what they have sent."""
    with communicator(rank, world_size, url, arena_bytes=4 << 20, _tuning=Tuning(tile=64, blocks=3)) as comm:
        if rank == 0:
            comm.send(torch.arange(20_000), 1, 2)
            return comm.world_size
        y = torch.full((20_000,), -1)
        return comm.recv(y, None, 2), torch.equal(y, torch.arange(20_000)), comm._internal.arena_layout.queues > 3
