"""Calls made in callbacks of futures, on ranks that differ in speed and attach the callbacks at different times."""

from __future__ import annotations

import functools
import random
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

import tricomm
from tests.c10d.bodies.groups import default_group, of, same
from tests.core.bodies.common_bodies import attempt
from tricomm.c10d import call_futures, dtype_emulation, group_calls, message_collectives
from tricomm.c10d.call_futures import CallFuture


def _value(rank, call):
    return torch.full((4,), float(10**call * (rank + 1)))


def _wanted(world_size, call):
    return sum(_value(r, call) for r in range(world_size))


def slow_or_late(rank, world_size, tell, url, route, slow, late, untracked=False):
    """Calls of one shape, some in callbacks, which rank 0 runs slowly (`slow`) or attaches late. Returns what is wrong.

    `untracked`: callbacks do not know their place.
    """
    if untracked:
        call_futures.current_origin.__globals__["_running"] = lambda origin: threading.Lock()
    xs = [_value(rank, call) for call in range(7)]
    with default_group(rank, world_size, url, route, timeout=20.0):
        dist.barrier()
        first = dist.all_reduce(xs[0], async_op=True)
        second = dist.all_reduce(xs[1], async_op=True)
        if late and rank == 0:
            second.wait()
            time.sleep(0.2)

        def call(number, future):
            if slow and rank == 0:
                time.sleep(1.2 if number == 2 else 0.1)
            dist.all_reduce(xs[number])
            return number

        future = first.get_future()
        chain = future.then(lambda f: call(2, f)).then(lambda f: call(3, f))
        another = future.then(lambda f: call(4, f))
        both = torch.futures.collect_all([second.get_future(), future]).then(lambda f: call(5, f))
        last = dist.all_reduce(xs[6], async_op=True)
        for done in (last, chain, another, both):
            done.wait()
        return [n for n, x in enumerate(xs) if not same(x, _wanted(world_size, n))]


def one_sided(rank, world_size, tell, url, route):
    """A callback that only rank 0 attaches: return its error there, and the results of the other rank's next calls."""
    with default_group(rank, world_size, url, route, timeout=2.0):
        x = torch.ones(4)
        work = dist.all_reduce(x, async_op=True)
        if rank == 0:
            done = work.get_future().then(lambda f: dist.all_reduce(torch.full((4,), 7.0)))
        dist.all_reduce(y := torch.full((4,), 3.0))
        work.wait()
        time.sleep(3 * rank)
        kind, text, _ = attempt(done.wait if rank == 0 else lambda: dist.all_reduce(torch.ones(4)))
        return x.tolist(), y.tolist(), f"{kind}: {text}"


class _Slow:
    """Sleeps at random moments on one rank."""

    def __init__(self, rank, seed):
        self._random, self._rank = random.Random(seed), rank

    def __call__(self, function):
        @functools.wraps(function)
        def slowed(*args, **options):
            if self._rank == 0 and self._random.random() < 0.5:
                time.sleep(self._random.random() * 0.01)
            return function(*args, **options)

        return slowed


def _chained(state, bucket):
    """A hook whose callbacks make calls: a mean in two halves, the second one in a callback of a callback."""
    halves = list(bucket.buffer().chunk(2))

    def reduce(half):
        return lambda f: dist.all_reduce(half, group=state, async_op=True).get_future().wait()[0]

    first = dist.all_reduce(torch.zeros(1), group=state, async_op=True).get_future()
    chain = first.then(reduce(halves[0])).then(reduce(halves[-1])) if len(halves) > 1 else first.then(reduce(halves[0]))
    return chain.then(lambda f: bucket.buffer().div_(2))


def _losses(rank, group, hook, slow):
    torch.manual_seed(3)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.001, process_group=group)
    originals = CallFuture.then, power._orthogonalize
    CallFuture.then, power._orthogonalize = slow(CallFuture.then), slow(power._orthogonalize)
    try:
        if hook == "none":
            pass
        elif hook == "power":
            state = power.PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=1)
            wrapped.register_comm_hook(state, power.powerSGD_hook)
        else:
            wrapped.register_comm_hook(group, _chained)
        losses = []
        for step in range(5):
            loss = (wrapped(of(rank, (8, 16), call=step)) ** 2).mean()
            loss.backward()
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(p.grad, alpha=0.01)
                    p.grad = None
            losses.append(loss.item())
        return losses
    finally:
        CallFuture.then, power._orthogonalize = originals


def hooks(rank, world_size, tell, url, route, runs):
    """Trainings with one rank slowed at random moments, whose losses differ from those over gloo.

    gloo runs no hook here: both of its threads may end up in callbacks that wait. The chained hook takes the mean, and
    PowerSGD's losses are compared with those of ranks that are not slowed.
    """
    wrong = []
    with default_group(rank, world_size, url, route, timeout=60.0) as world:
        gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
        right = {"chained": _losses(rank, gloo, "none", _Slow(1, 0))}
        right["power"] = _losses(rank, world, "power", _Slow(1, 0))
        for hook in right:
            for run in range(runs):
                losses = _losses(rank, world, hook, _Slow((rank + run) % world_size, run))
                wrong += [] if losses == right[hook] else [(hook, run, losses, right[hook])]
        return wrong


def _fails(*args):
    raise RuntimeError("no room here")


def of_one_rank(rank, world_size, tell, url, route, step):
    """An error of rank 1 alone: before it sends anything, after the last message, or in the middle of a call."""
    name = {"before": (dtype_emulation, "_scale"), "after": (group_calls, "put")}.get(
        step, (message_collectives, "reduce_into")
    )
    with default_group(rank, world_size, url, route, timeout=20.0):
        original = getattr(*name)
        if rank == 1:
            setattr(*name, _fails)
        x = torch.ones(600_000 if step == "during" else 8)[::2]  # in two shots, or with the records
        op = dist._make_nccl_premul_sum(2.0) if step == "before" else dist.ReduceOp.SUM
        began = time.monotonic()
        try:
            dist.all_reduce(x, op)
            error = "none"
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        seconds = time.monotonic() - began
        setattr(*name, original)
        try:
            dist.all_reduce(y := torch.ones(3))
        except tricomm.TricommError as failure:
            y = type(failure).__name__
        return error, seconds < 10, y if isinstance(y, str) else y.tolist()
