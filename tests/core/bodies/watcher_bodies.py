"""What ranks do with many communicators. Module-level, so that a new process can find it."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from datetime import timedelta

import torch
from torch.distributed import FileStore, PrefixStore, TCPStore

import tricomm
from tests.core.bodies.common_bodies import SMALL, leftovers

OWN = ("fds", "maps", "threads")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def make(rank, world_size, store, name):
    store = PrefixStore(name, store)
    return tricomm.Communicator(store, rank, world_size, "cpu", options=tricomm.Options(**SMALL))


def many(rank, world_size, tell, folder, count, limit):
    """More communicators than this process may open files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    store, sums = FileStore(f"{folder}/store", world_size), []
    comms = [make(rank, world_size, store, str(n)) for n in range(count)]
    for n, comm in enumerate(comms):
        x = torch.full((1,), rank + 1 + n, dtype=torch.int32)
        comm.all_reduce(x)
        sums.append(x.item())
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    descriptors = len(os.listdir("/proc/self/fd"))
    comms[0].barrier()
    busy, began = time.process_time(), time.monotonic()
    time.sleep(2.0)
    idle = (time.process_time() - busy) / (time.monotonic() - began)
    comms[0].barrier()
    for comm in comms:
        comm.close()
    return threads, descriptors, sums, idle


def many_lose_a_peer(rank, world_size, tell, folder, count):
    """A peer dies while nothing is called; each group names it at its next call."""
    store = FileStore(f"{folder}/store", world_size)
    comms = [make(rank, world_size, store, str(n)) for n in range(count)]
    comms[0].barrier()
    tell(os.getpid() if rank else "ready")
    kinds, slowest = set(), 0.0
    if rank:
        time.sleep(60.0)
    time.sleep(1.0)
    for comm in comms:
        began = time.monotonic()
        try:
            comm.all_reduce(torch.ones(3))
        except tricomm.TricommError as error:
            kinds.add(type(error).__name__)
        slowest = max(slowest, time.monotonic() - began)
        comm.close()
    return kinds, slowest


def without_descriptors(rank, world_size, tell, poor, port):
    """One rank may open no file any more."""
    seconds = timedelta(seconds=20)
    store = TCPStore("127.0.0.1", port, world_size, rank == 0, seconds, wait_for_workers=False)
    with make(rank, world_size, store, "warm") as comm:
        comm.barrier()
    before, text, kind = leftovers(), "", "nothing"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == poor:
        lowest = os.open("/dev/null", os.O_RDONLY)  # the limit is one of numbers: here the next open fails
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    began = time.monotonic()
    try:
        make(rank, world_size, store, "poor").close()
    except tricomm.TricommError as error:
        kind, text = type(error).__name__, str(error)
    took = time.monotonic() - began
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = leftovers()
    with make(rank, world_size, store, "after") as comm:
        x = torch.full((1,), rank + 1)
        comm.all_reduce(x)
        comm.barrier()
        return kind, text, took, {w: left[w] - before[w] for w in OWN if left[w] - before[w]}, x.item()
