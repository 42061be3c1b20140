"""An interrupt at any line of a c10d call: the caller gets it, the other rank is told, a new group works."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import ranks
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


def interrupt_lines(rank, world_size, tell, folder, route, call, kind, part, parts, first, without=False):
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


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return str(tmp_path)


def walk(folder, route, call, kind="KeyboardInterrupt", part=0, parts=1, first=False, without=False):
    results = ranks.run(2, interrupt_lines, folder, route, call, kind, part, parts, first, without, timeout=280)
    return results[0][0], [wrong for _, both in results for wrong in both]


def test_without_the_guard_the_other_rank_is_not_told(folder):
    _, wrong = walk(folder, "gloo", "all_reduce", part=0, parts=12, without=True)
    assert any("the group still works" in text for text in wrong)


QUICK = {
    ("gloo", "all_reduce", "KeyboardInterrupt", False),
    ("kernels", "async", "Alarm", False),
    ("gloo", "all_gather", "Alarm", True),
    ("kernels", "barrier", "Alarm", True),
}


def cases():
    for case in itertools.product(["gloo", "kernels"], CALLS, ["KeyboardInterrupt", "Alarm"], [False, True]):
        name = "-".join([*case[:3], "first call" if case[3] else "later"])
        yield pytest.param(*case, id=name, marks=[] if case in QUICK else [pytest.mark.soak])


@pytest.mark.parametrize(("route", "call", "kind", "first"), list(cases()))
def test_every_line_of_a_call(route, call, kind, first, folder):
    count, wrong = walk(folder, route, call, kind, first=first)
    assert wrong == [] and count > 40
