"""Broadcasts in shares: large ones over messages, of three ranks or more."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from tests.c10d.bodies.groups import default_group, of, poisoned, same
from tests.core.bodies.common_bodies import attempt
from tricomm.c10d import message_collectives
from tricomm.c10d.call_records import CallContext

LARGE = message_collectives._SCATTER_BYTES


def exact(rank, world_size, tell, url, swap_rows=False):
    """The broadcasts of every root and of odd sizes that gave something wrong, and whether any went in shares.

    `swap_rows`: rank 1 receives the shares of two ranks into each other's place.
    """
    wrong, in_shares = [], []
    real, exchange = message_collectives._scatter_and_gather, CallContext.exchange

    def counted(*given):
        in_shares.append(True)
        real(*given)

    def swapped(context, sends, receives):
        places = reversed(receives) if rank == 1 else receives
        exchange(context, sends, [(r, at) for (r, _), (_, at) in zip(receives, places, strict=True)])

    message_collectives._scatter_and_gather = counted
    with default_group(rank, world_size, url):
        if swap_rows:
            CallContext.exchange = swapped
            return list(_each_root(rank, world_size, LARGE + LARGE // 2, torch.uint8)), bool(in_shares)
        sizes = [(LARGE + 3, torch.uint8), (LARGE // 4 - 1, torch.float32)]
        for size, dtype in sizes:
            wrong += _each_root(rank, world_size, size, dtype)
        message_collectives._SCATTER_BYTES = 48
        for size in (0, 1, 11, 12, 13, 47, 48, 49, 60, 997):
            for dtype in (torch.uint8, torch.float32, torch.complex64):
                wrong += _each_root(rank, world_size, size, dtype)
    return wrong, bool(in_shares)


def _each_root(rank, world_size, size, dtype):
    for root in range(world_size):
        call = size + root
        x = of(root, (size,), dtype, call=call) if rank == root else poisoned((size,), dtype)
        dist.broadcast(x, root)
        if not same(x, of(root, (size,), dtype, call=call)):
            yield size, str(dtype), root


def dies(rank, world_size, tell, url, lost, exchange):
    """Rank `lost` dies at its data exchange of that number, in a broadcast of rank 0. Returns the first error of the
    others, in that call or in the next one, and its seconds."""
    real, made = CallContext.exchange_memory, []

    def dying(context, sends, receives):
        made.append(True)
        if rank == lost and len(made) == exchange:
            os.kill(os.getpid(), signal.SIGKILL)
        real(context, sends, receives)

    with default_group(rank, world_size, url):
        dist.barrier()
        CallContext.exchange_memory = dying
        began = time.monotonic()
        x = torch.zeros(LARGE)
        said = attempt(lambda: (dist.broadcast(x, 0), dist.barrier()))
        return said[0], said[1], time.monotonic() - began


def mismatches(rank, world_size, tell, url, checked):
    """What is raised if the ranks' broadcasts differ; whether the group's next one is right."""
    os.environ["TRICOMM_CHECK"] = str(int(checked))
    said = []
    with default_group(rank, world_size, url, timeout=10.0):
        cases = [
            lambda: dist.broadcast(torch.zeros(LARGE + 8 * (rank == 2), dtype=torch.uint8), 0),
            lambda: dist.broadcast(torch.zeros(LARGE - 8 * (rank == 1), dtype=torch.uint8), 0),  # in one part there
            lambda: dist.broadcast(torch.zeros(LARGE), 1 if rank == 1 else 0),
        ]
        for case in cases if checked else cases[:1]:
            said.append(attempt(case)[:2])
            if checked:
                x = of(0, (LARGE,), call=7) if rank == 0 else poisoned((LARGE,))
                dist.broadcast(x, 0)
                assert same(x, of(0, (LARGE,), call=7))
    return said
