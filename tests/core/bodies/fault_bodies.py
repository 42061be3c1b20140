"""What ranks do when something goes wrong. Module-level, so that a new process can find it."""

from __future__ import annotations

import os
import threading
import time

import torch

import tricomm
from tests.core.bodies.common_bodies import SMALL, communicator, leftovers
from tricomm.core.runtime import PROCESSES
from tricomm.kernels import layout


def closes_in_a_call(rank, world_size, tell, url):
    """Another thread closes the group while this one waits: an error, not a crash."""
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
    comm.barrier()
    if rank == 1:
        time.sleep(2.0)
        comm.close()
        return "closed"
    threading.Timer(0.5, comm.close).start()
    try:
        comm.all_reduce(torch.ones(4))
    except tricomm.GroupAborted as error:
        time.sleep(0.5)
        return str(error)


def beside_a_replay(rank, world_size, tell, url):
    """Rank 0's launch finds another one of its communicator running, and rank 1 never comes."""
    with communicator(rank, world_size, url) as comm:
        began = time.monotonic()
        try:
            comm.all_reduce(torch.ones(4))  # the other rank may lose the group before this one has returned
            if rank == 0:
                comm.group_table[layout.BUSY] = 12345  # as the kernel of a replayed graph would have set it
                comm.all_reduce(torch.ones(4))
            while time.monotonic() < began + 30.0:
                comm.check()
                time.sleep(0.01)
        except tricomm.GroupAborted as error:
            return str(error), time.monotonic() - began


def cannot_load(rank, world_size, tell, url, kind):
    """Rank 1 cannot load the kernel of a call that rank 0 waits in."""
    bind = PROCESSES.bind

    def refuse(kernel, *arguments, **keywords):
        if kind in kernel.fn.__name__:
            raise tricomm.ResourceError("cuModuleLoadData on cuda:1 failed: CUDA_ERROR_OUT_OF_MEMORY")
        return bind(kernel, *arguments, **keywords)

    if rank == 1:
        PROCESSES.bind = refuse
    with communicator(rank, world_size, url) as comm:
        began = time.monotonic()
        try:
            comm.barrier()  # rank 0 may still wait in it when rank 1, which has left it, aborts the group
            began = time.monotonic()
            if kind == "all_reduce":
                comm.all_reduce(torch.ones(4))
            else:
                comm.recv(torch.ones(4), 1) if rank == 0 else comm.send(torch.ones(4), 0)
        except tricomm.TricommError as error:
            return type(error).__name__, str(error), time.monotonic() - began


def symmetric_alone(rank, world_size, tell, url):
    """One rank asks for symmetric memory while the other makes a call."""
    with communicator(rank, world_size, url) as comm:
        comm.barrier()
        began = time.monotonic()
        try:
            comm.symmetric((4,), torch.float32) if rank == 0 else comm.all_reduce(torch.ones(4))
        except tricomm.TricommError as error:
            return type(error).__name__, str(error), time.monotonic() - began


def all_stopped(rank, world_size, tell, url):
    """Calls that go on while the whole job is stopped and continued."""
    with communicator(rank, world_size, url, stall_timeout=0.6) as comm:
        comm.barrier()
        tell(os.getpid())
        end = time.monotonic() + 5.0
        more = torch.ones(1, dtype=torch.int32)
        while more[0]:
            more = torch.tensor([int(time.monotonic() < end)], dtype=torch.int32)
            comm.all_reduce(more, op="min")
        return "fine"


def broken_monitor(rank, world_size, tell, url):
    """A monitor that fails says so; it does not leave the next call without a watch."""
    with communicator(rank, world_size, url) as comm:
        if rank == 0:
            comm._monitor._peers = None
            time.sleep(0.3)
        try:
            for _ in range(100):
                comm.all_reduce(torch.ones(3))
        except tricomm.GroupAborted as error:
            return str(error)


def endless(rank, world_size, tell, url, algorithm, protocol, options):
    """Call until something goes wrong; say what, after how long, and what is left behind."""
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
    left = leftovers()
    left = {name: sorted(left[name] - before[name]) for name in before if left[name] - before[name]}
    return kind, text, caught, last, left


def makes_another(rank, world_size, tell, url, other, survivors):
    """After a fault the same processes make a new communicator."""
    with communicator(rank, world_size, url) as comm:
        comm.barrier()
        tell(os.getpid())
        try:
            while True:
                comm.all_reduce(torch.ones(10))
        except tricomm.TricommError as error:
            kind = type(error).__name__
    if rank not in survivors:
        return kind, None
    with communicator(survivors.index(rank), len(survivors), other) as comm:
        x = torch.ones(10)
        comm.all_reduce(x)
        return kind, x[0].item()


def diverges(rank, world_size, tell, url, how):
    """Twenty good calls, then one rank calls something else."""
    with communicator(rank, world_size, url) as comm:
        began = time.monotonic()
        odd = rank == world_size - 1
        try:
            for _ in range(20):  # a slow rank may learn of the mismatch before it returns from the last of them
                comm.all_reduce(torch.ones(8))
            began = time.monotonic()
            if how == "collective":
                comm.all_gather(torch.ones(8)) if odd else comm.all_reduce(torch.ones(8))
            elif how == "count":
                comm.all_reduce(torch.ones(9 if odd else 8))
            elif how == "dtype":
                comm.all_reduce(torch.ones(8, dtype=torch.int32 if odd else torch.float32))
            elif how == "op":
                comm.all_reduce(torch.ones(8), op="max" if odd else "sum")
            elif how == "algorithm":
                comm.all_reduce(torch.ones(8), algorithm="two_shot" if odd else "one_shot")
            else:
                comm.barrier() if odd else comm.all_reduce(torch.ones(8))
        except tricomm.TricommError as error:
            return type(error).__name__, str(error), time.monotonic() - began
        return "nothing", "", 0.0


def absent(rank, world_size, tell, url, limit):
    """The last rank lives, and makes no call."""
    with communicator(rank, world_size, url, timeout=limit) as comm:
        comm.barrier()
        began = time.monotonic()
        try:
            if rank == world_size - 1:
                time.sleep(limit + 1.5)
                comm.all_reduce(torch.ones(3))
            else:
                comm.all_reduce(torch.ones(3))
        except tricomm.TricommError as error:
            return type(error).__name__, str(error), time.monotonic() - began
        return "nothing", "", 0.0


def leaves(rank, world_size, tell, url, how):
    """The last rank closes, returns, or exits; the others go on calling."""
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
    comm.all_reduce(torch.ones(4))
    comm.barrier()
    if rank == world_size - 1:
        time.sleep(0.2)  # until the others have left the barrier
        if how == "exit":
            os._exit(0)
        comm.close()
        return "left", ""
    began = time.monotonic()
    try:
        while True:
            comm.all_reduce(torch.ones(4))
    except tricomm.TricommError as error:
        kind, text = type(error).__name__, str(error)
    finally:
        comm.close()
    return kind, text, time.monotonic() - began


def interrupted(rank, world_size, tell, url):
    """Ctrl-C in the middle of a call."""
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
    comm.barrier()
    if rank == 1:
        tell(os.getpid())
        try:
            time.sleep(2.0)  # long after the other rank was interrupted in its call
            comm.all_reduce(torch.ones(3))
        except tricomm.TricommError as error:
            return type(error).__name__, str(error)
        finally:
            comm.close()
    tell(os.getpid())
    try:
        comm.all_reduce(torch.ones(3))
    except KeyboardInterrupt:
        return "KeyboardInterrupt", ""
    finally:
        comm.close()
    return "nothing", ""
