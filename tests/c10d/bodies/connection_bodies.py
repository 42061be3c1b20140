"""What ranks see of faults on a group's connections. Module-level, so that a new process can find it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import tricomm
from tests.c10d.bodies.groups import default_group, of, same
from tests.core.bodies.common_bodies import attempt
from tricomm.store.tcp import set_up, waits


def after_one_that_is_not_waited_for():
    first = dist.all_reduce(torch.ones(3), async_op=True)
    while not first.is_completed():
        time.sleep(0.01)
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def survivor(rank, world_size, tell, url, timeout, way, unwatched=False, victim=2):
    """Rank `victim` is in the test's hands; the others wait for it."""
    if unwatched:
        waits.Wait.look = lambda waiting: None
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "next": after_one_that_is_not_waited_for,
        "async": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(torch.ones(3), victim),
        "send": lambda: dist.send(torch.ones(1 << 22), victim),
        "any": lambda: dist.recv(torch.ones(3)),
    }
    with default_group(rank, world_size, url, timeout=timeout) as world:
        dist.barrier()
        tell(os.getpid())
        if rank == victim:
            time.sleep(60)
        outcome = attempt(calls[way])
        lost = attempt(lambda: world.allreduce([torch.ones(3)]))
        assert lost[0] == "GroupAborted" and "lost" in lost[1], lost
    return outcome


def leaves(rank, world_size, tell, url, how):
    """The last rank goes while the others wait; `slow`: rank 1 comes late, and rank 0 hears it before."""
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    dist.barrier()
    if rank == world_size - 1:
        time.sleep(0.5)
        if how == "destroys":
            dist.destroy_process_group()
            time.sleep(6)
        elif how == "interrupted":
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            began = time.monotonic()
            try:
                dist.recv(torch.ones(1), 0)
            except KeyboardInterrupt:
                return "KeyboardInterrupt", "", time.monotonic() - began
        elif how == "fails":
            dist.group.WORLD._dispatcher.abort_waits(tricomm.GroupAborted("rank 2 has no more data"))
            time.sleep(2)
        return "left", "", 0.0
    if rank == 1:
        time.sleep(5)
    return attempt(lambda: dist.all_reduce(torch.ones(3)))


def finished_first(rank, world_size, tell, url):
    """Rank 2 has its part of a broadcast, and goes; that is no fault of the call that rank 0 is still in."""
    os.environ["TRICOMM_CHECK"] = "0"
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    dist.barrier()
    if rank == 1:
        time.sleep(3)
    x = of(rank, (1000,))
    dist.broadcast(x, 0)
    return same(x, of(0, (1000,)))


def few_descriptors(rank, world_size, tell, url, checked):
    """Rank 1 runs out of descriptors while all make groups."""
    if not checked:
        set_up._check_descriptors = lambda generation, name: None
    with default_group(rank, world_size, url, timeout=20.0):
        groups = [dist.new_group()]
        if rank == 1:
            used = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 24, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        outcome = ("nothing", "", 0.0)
        for _ in range(20):
            # torch itself waits for as long as this for ranks that do not come out of a new group
            outcome = attempt(lambda: groups.append(dist.new_group(timeout=timedelta(seconds=3))))
            if outcome[0] != "nothing":
                break
        for group in groups if checked else []:
            x = torch.ones(2)
            dist.all_reduce(x, group=group)
            assert x[0] == world_size
        return outcome, len(groups)


def many_groups(rank, world_size, tell, url, count):
    """What `count` groups cost this process: threads, descriptors, seconds to make, to use and to destroy all."""
    with default_group(rank, world_size, url):
        x = torch.ones(2)
        dist.all_reduce(x)
        threads, files = _threads(), len(os.listdir("/proc/self/fd"))
        began = time.monotonic()
        groups = [dist.new_group() for _ in range(count)]
        made = time.monotonic()
        for number, group in enumerate(groups):
            y = of(rank, (4,), call=number)
            dist.all_reduce(y, group=group)
            assert same(y, sum(of(r, (4,), call=number) for r in range(world_size)))
        used = time.monotonic()
        more = _threads() - threads, len(os.listdir("/proc/self/fd")) - files
        dist.barrier()
        ending = time.monotonic()
        for group in groups:
            dist.destroy_process_group(group)
        ended = time.monotonic()
        del groups, group
        gc.collect()
        dist.barrier()
        time.sleep(0.2)
        after = _threads() - threads, len(os.listdir("/proc/self/fd")) - files
    return {
        "threads": more[0],
        "descriptors": more[1],
        "after": after,
        "make": made - began,
        "use": used - made,
        "destroy": ended - ending,
    }


def _threads():
    return len(os.listdir("/proc/self/task"))


def interrupted_among_others(rank, world_size, tell, url):
    """Several asynchronous calls are under way on each rank when a signal's handler raises on rank 0."""
    with default_group(rank, world_size, url, timeout=20.0):
        dist.all_reduce(torch.ones(3))
        if rank == 0:
            signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
            signal.setitimer(signal.ITIMER_REAL, 0.4)
        try:
            while True:
                for work in [dist.all_reduce(torch.ones(100), async_op=True) for _ in range(3)]:
                    work.wait()
        except (ZeroDivisionError, tricomm.TricommError) as error:
            return type(error).__name__, time.monotonic()
