"""Helpers of functions that ranks run: a communicator, the error of a call, descriptors and mappings still held."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager

import torch

import tricomm
from tests import ranks
from tests.open_files import open_files
from tricomm.deadline import poll
from tricomm.errors import TricommError
from tricomm.kernels import layout
from tricomm.options import digest_of
from tricomm.store.arenas.open_arena import open_arena
from tricomm.store.handshake import handshake

OWN = ("fds", "maps", "threads")  # of this process alone; others use /dev/shm, too
SMALL = dict(arena_bytes=256 * 1024, stall_timeout=30.0, timeout=60.0)


@contextmanager
def communicator(rank, world_size, url, **options):
    with tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**{**SMALL, **options})) as comm:
        yield comm


@contextmanager
def alone(folder):
    """A communicator of this process alone."""
    with communicator(0, 1, f"file://{folder}/alone") as comm:
        yield comm


def over(runtime, store, rank, world_size, options):
    """A communicator on the CPU's memory, whose kernels `runtime` launches."""
    plan, cpu, seconds = layout.plan(world_size, options.arena_bytes), torch.device("cpu"), options.timeout
    control = handshake(store, rank, world_size, seconds, digest_of(options, plan, "cpu"))
    arena = open_arena(control, plan.nbytes, cpu, seconds)
    return tricomm.Communicator._over(control, arena, plan, cpu, seconds, options, runtime)


def attempt(call):
    """The class and text of the error that `call` raises, and the seconds until then."""
    began = time.monotonic()
    try:
        call()
    except tricomm.TricommError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def right(comm, turn=0):
    """Calls of all ranks, with results that no other number of ranks and no other turn gives."""
    x = torch.arange(1000, dtype=torch.float32) + comm.rank * (turn + 1)
    want = comm.world_size * torch.arange(1000, dtype=torch.float32)
    want += (turn + 1) * sum(range(comm.world_size))
    y = torch.full_like(x, torch.nan)
    comm.all_reduce(x, out=y, algorithm=("one_shot", "two_shot")[turn // 2 % 2], protocol=("ll", "simple")[turn % 2])
    assert torch.equal(y, want), (comm, y[:4], want[:4])
    rows = comm.all_gather(x[:7])
    want = torch.cat([torch.arange(7, dtype=torch.float32) + rank * (turn + 1) for rank in range(comm.world_size)])
    assert torch.equal(rows, want), (comm, rows, want)


def leftovers() -> dict[str, set[str]]:
    """The resources that a group could leave in this process."""
    with open("/proc/self/maps") as maps:
        mapped = {" ".join(line.split()[4:]) for line in maps if "memfd:tricomm" in line}
    threads = {t.name for t in threading.enumerate() if "tricomm" in t.name}
    return {
        "shm": {name for name in os.listdir("/dev/shm") if "tricomm" in name},  # another test's may be there as well
        "fds": {f for f in open_files().values() if "memfd" in f or "pidfd" in f},
        "maps": mapped,
        "threads": threads,
    }


def refused(action):
    try:
        action()
    except TricommError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def more_than(before, *names):
    """The resources added since `before`, an earlier result of `leftovers`; only the kinds `names`, if given."""

    def more():
        after = leftovers()
        return {name: sorted(after[name] - before[name]) for name in names or before if after[name] - before[name]}

    # On a busy machine a thread that was told to end runs some time later.
    poll(lambda: "threads" not in more(), ranks.BUSY, 0.01)
    return more()


def and_left(rank, world_size, tell, body, *args):
    """Run `body`; return its result and the resources that it leaves in the process."""
    before = leftovers()
    value = body(rank, world_size, tell, *args)
    gc.collect()
    return value, more_than(before, *OWN)


def endless(rank, world_size, tell, url, algorithm, protocol, options):
    """Call until an error is raised; return it, the seconds until then, and the resources left in the process."""
    before = leftovers()
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**{**SMALL, **options}))
    comm.barrier()
    tell(os.getpid())
    last = time.monotonic()
    try:
        seed = 0
        while True:
            x = torch.full((1000,), float(seed % 7 + rank))
            last = time.monotonic()
            comm.all_reduce(x, algorithm=algorithm, protocol=protocol)
            seed += 1
    except tricomm.TricommError as error:
        caught, kind = time.monotonic(), type(error).__name__
        text = str(error)
    comm.close()
    del comm
    return kind, text, caught, last, more_than(before)
