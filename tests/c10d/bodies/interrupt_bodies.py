"""Two ranks, one of which is interrupted at a chosen line of a c10d call: each line costs both ranks a group."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.core.bodies.interrupt_bodies import KINDS, Walk
from tricomm import threads
from tricomm.c10d import group_over, process_group
from tricomm.c10d.torch_names import c10d
from tricomm.errors import TricommError

LIMIT = 30.0  # seconds a call


def _all_reduce(group):
    group.allreduce([torch.ones(4)], _options(dist.AllreduceOptions))


def _asynchronous(group):
    group.allreduce([torch.ones(4)], dist.AllreduceOptions()).wait()


def _all_gather(group):
    group.allgather([[torch.zeros(3), torch.zeros(3)]], [torch.ones(3)], _options(c10d.AllgatherOptions))


def _barrier(group):
    group.barrier(_options(dist.BarrierOptions))


CALLS = {"all_reduce": _all_reduce, "async": _asynchronous, "all_gather": _all_gather, "barrier": _barrier}


def _options(kind):
    options = kind()
    options.asyncOp, options.timeout = False, timedelta(seconds=LIMIT)
    return options


def walk(rank, world_size, tell, folder, route, call, kind, part, parts, first, without=False):
    """Interrupt rank 0 at every `parts`th line; returns the lines walked, and what went wrong on this rank.

    `first`: the call is the first one of its group. `without`: an interrupted call does not tell its peers.
    """
    os.environ.update(TRICOMM_CPU=route, TRICOMM_ARENA_BYTES="262144")
    if without:
        process_group.TricommGroup.interrupted = lambda group, error: None
        globals()["LIMIT"] = 2.0  # of calls
    signal.signal(signal.SIGUSR2, Walk().line)  # what a signal handler raises is an interrupt
    wrong, lines = [], []
    number = 0

    def group():
        nonlocal number
        number += 1
        store = dist.FileStore(f"{folder}/{number}", world_size)
        made = group_over(store, rank, world_size, timedelta(seconds=30.0))
        if not first:
            CALLS[call](made)
        return made

    made = group()
    if rank == 0:
        with Walk() as walker:
            CALLS[call](made)
        lines = sorted(set(walker.lines))[part::parts]
    else:
        CALLS[call](made)
    made.shutdown()
    agreed = dist.FileStore(f"{folder}/lines", world_size)
    if rank == 0:
        agreed.set("lines", str(len(lines)))
    count = int(agreed.get("lines"))
    for n in range(count):
        made = group()
        if rank == 0:
            agreed.get(f"ready/{n}")  # the first call has ended on both
            wrong += _interrupted(made, CALLS[call], KINDS[kind], lines[n])
            agreed.set(f"raised/{n}", str(time.monotonic()))
        else:
            agreed.set(f"ready/{n}", "")
            wrong += _told(made, CALLS[call], lambda n=n: float(agreed.get(f"raised/{n}")), n)
        made.shutdown()
    helpers = [t.name for t in threading.enumerate() if t.name == "tricomm-helper"]
    return count, wrong + helpers[threads._SPARE + 1 :]


def _interrupted(group, call, kind, line):
    with Walk(kind, line) as walker:
        try:
            call(group)
            return [f"{line}: nothing came of it"] if walker.raised else []  # the line of a first look only
        except kind:
            pass
        except BaseException as error:
            return [f"{line}: {type(error).__name__}: {error}"]
    try:
        call(group)
        return [f"{line}: the group still works"]
    except TricommError:
        return []


def _told(group, call, raised, n):
    try:
        call(group)
    except TricommError as error:
        seconds = time.monotonic() - raised()
        wrong = [] if "stopped by" in str(error) else [f"{n}: {type(error).__name__}: {error}"]
        return wrong + ([f"{n}: {seconds:.1f} s"] if seconds > 5.0 else [])
    return []  # rank 0 was not interrupted, and says so, or only when the call was over
