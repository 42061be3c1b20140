"""Bodies of ranks in tests of replace: join, replace until it succeeds, and use the group."""

from __future__ import annotations

import gc
import os
import signal

import torch

import tricomm
from tests.core.bodies.common_bodies import OWN, SMALL, leftovers, more_than, right
from tests.core.faults.test_shrink import made, until_fault
from tricomm.core import recovery
from tricomm.store.rendezvous import open_store


def stored(url, rank, world_size):
    return open_store(url, rank, world_size, 30)[0]


def joined(url, rank, world_size, limit=60.0, **options):
    given = tricomm.Options(**{**SMALL, **options})
    store = stored(url, rank, world_size)
    return tricomm.join(store, rank, world_size, "cpu", options=given, meeting_timeout=limit)


def places(comm):
    """All addresses that captured graphs know of this rank's memory."""
    table, *numbers = comm._internal.group.argument
    return table.data_ptr(), numbers, comm._internal.group.control.device_words


def use(comm, turns=20):
    for turn in range(turns):
        right(comm, turn)
    comm.send(torch.full((3,), 7.0 + comm.rank), (comm.rank + 1) % comm.world_size, async_op=True)
    got, before = torch.empty(3), (comm.rank - 1) % comm.world_size
    assert comm.recv(got, before) == before and got.tolist() == [7.0 + before] * 3
    comm.barrier()


def recovered(comm, failed, join=None):
    """Replace, or join if there is no `comm` yet, until it succeeds; `failed` takes the errors until then."""
    for _ in range(6):
        try:
            if comm is None:
                comm = join()
            else:
                comm.replace(timeout=30)
            right(comm)
            return comm
        except tricomm.TricommError as error:
            failed.append(f"{type(error).__name__}: {error}")
    raise AssertionError(f"no group: {failed}")


def lasts(rank, world_size, tell, url, victim, owner, step):
    """Replace until it succeeds; the errors until then. `victim` ends itself as its call reaches `step` of `owner`."""
    before, failed = leftovers(), []
    comm = made(url, rank, world_size)
    tell(os.getpid())
    until_fault(comm)
    if rank == victim:
        end_at(owner, step)
    use(recovered(comm, failed), 4)
    comm.close()
    del comm
    gc.collect()
    return failed, more_than(before, *OWN)


def end_at(owner, step):
    name, after = step.removeprefix("after "), step.startswith("after")
    usual = getattr(owner, name)

    def dying(*arguments):
        if after:
            usual(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)


def comes_at_last(rank, world_size, tell, url, place, size, step=""):
    """Join until it succeeds, unless this process ends itself at `step` of its own."""
    if step:
        end_at(recovery.Newcomer, step)
    failed = []
    comm = recovered(None, failed, lambda: joined(url, place[rank], size, 30))
    use(comm, 4)
    comm.close()
    return failed
