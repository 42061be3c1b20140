"""Bodies of ranks that launch users' kernels. Module-level, so that a new process can find them."""

from __future__ import annotations

import os
import signal
import time

import torch

import tricomm
from tests.core.bodies.common_bodies import attempt, communicator
from tests.core.bodies.user_kernel import exchanges, polls


def waits(rank, world_size, tell, url, fault, how):
    """Rank 0's kernel waits, and rank 1 dies, stops to answer for the limit, or leaves. Returns the error's kind and
    text, its seconds, and whether this process still computes."""
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


def many_flags(rank, world_size, tell, url):
    with communicator(rank, world_size, url) as comm:
        w, seen = comm.symmetric((3,), torch.int64), []
        for number in range(1, 30):
            out = torch.full((2,), -1)
            comm.launch(exchanges, 1, comm.group_table, w.peers, out, number, RANK=rank, OTHER=1 - rank)
            seen.append(out.tolist())
        comm.barrier()
        return seen
