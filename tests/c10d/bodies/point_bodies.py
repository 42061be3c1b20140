"""What two ranks do in the tests of messages."""

from __future__ import annotations

import os
import resource
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import tricomm
from tests.c10d.bodies.groups import default_group, of, poisoned, refused, same

LATE = timedelta(seconds=30)


def progress(rank, world_size, tell, url, headed):
    """A message that is there after `is_completed` alone, in a tensor made under inference mode."""
    os.environ["TRICOMM_CHECK"] = "1" if headed else "0"
    with default_group(rank, world_size, url):
        with torch.inference_mode():
            x, y = of(0, (9,)), poisoned((9,))
        work = dist.isend(x, 1) if rank == 0 else dist.irecv(y, 0)
        end = time.monotonic() + 30
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        done = work.is_completed() and work.is_success() and (rank == 0 or same(y.clone(), x.clone()))
        work.wait()
        return done


def misfits(rank, world_size, tell, url, route):
    """Messages that are not what the receiver takes: named there, used up, and the group goes on."""
    said = []
    ones = torch.ones
    with default_group(rank, world_size, url, route):
        for tag, (sent, wanted) in enumerate(
            [
                (ones(8), ones(4)),
                (ones(4), ones(8)),
                (ones(4), ones(4, dtype=torch.int32)),
                (ones(0), ones(1)),
                (ones(1 << 20), ones(1)),
            ]
        ):
            if rank == 0:
                dist.send(sent, 1, tag=tag)
                dist.send(of(0, (5,), call=tag), 1, tag=tag)
                continue
            before = wanted.clone()
            said.append(refused(lambda w=wanted, t=tag: dist.recv(w, 0, tag=t), kind=tricomm.CollectiveMismatch))
            assert same(wanted, before)
            y = poisoned((5,))
            assert dist.recv(y, 0, tag=tag) == 0 and same(y, of(0, (5,), call=tag))
        if rank == 0:
            dist.send(ones(3), 1)
        else:
            work = dist.irecv(ones(2), tag=0)
            said.append(refused(work.wait, kind=tricomm.CollectiveMismatch))
            refused(work.wait, kind=tricomm.CollectiveMismatch)  # again, and no waiting for another message
            assert not work.is_success() and isinstance(work.exception(), tricomm.CollectiveMismatch)
        x = ones(3)
        dist.all_reduce(x)
        assert x[0] == world_size
    return said


def many(rank, world_size, tell, url, route):
    """Receives that are posted together, with one tag and with many, waited for in any order; large ones."""
    wrong = []
    other = 1 - rank
    with default_group(rank, world_size, url, route):
        outs = [poisoned((1000 + n,)) for n in range(12)]
        works = [dist.irecv(out, other, tag=n % 3) for n, out in enumerate(outs)]
        for n in range(12):
            x = of(rank, (1000 + n,), call=n)
            work = dist.isend(x, other, tag=n % 3)
            x.fill_(-1)  # what is sent is a copy
            works.append(work)
        for work in reversed(works):
            work.wait(LATE)
            assert work.is_completed()
        wrong += [n for n, out in enumerate(outs) if not same(out, of(other, (1000 + n,), call=n))]
        big = poisoned((4 << 20,))
        work = dist.irecv(big, other)
        dist.send(of(rank, (4 << 20,)), other)
        work.wait()
        wrong += [] if same(big, of(other, (4 << 20,))) else ["big"]
        assert work.result()[0] is big
    return wrong


def bare(rank, world_size, tell, url):
    """With TRICOMM_CHECK=0 a message that is too long is Gloo's to deal with."""
    os.environ["TRICOMM_CHECK"] = "0"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with default_group(rank, world_size, url):
        if rank == 0:
            dist.send(torch.ones(8), 1)
            return "sent"
        dist.recv(torch.ones(4), 0)
        return "received"


def wrapped(rank, world_size, tell, url):
    """Over a wrapper, messages of the group that it wraps are its own, and those of either are understood by both."""
    with default_group(rank, world_size, url, backend="gloo"):
        w = tricomm.wrap()
        x = of(rank, (3,))
        if rank == 0:
            dist.send(x, 1, group=w)
        else:
            dist.recv(x, 0)
        return x.tolist() == of(0, (3,)).tolist()
