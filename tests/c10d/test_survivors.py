"""A rank is lost in the middle of a step: the others get the named error, live, and make a new group."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import of
from tricomm.c10d import process_group, work_handles

MODES = ["plain", "hook", "tricomm's hook", "no_sync", "unused", "static", "fsdp2", "functional", "wait", "future"]
QUICK = {
    *(("gloo", mode, "kill") for mode in ("plain", "hook", "static", "fsdp2", "functional", "future")),
    *(("gloo", "plain", how) for how in ("leave", "raise")),
    *(("kernels", mode, "kill") for mode in ("plain", "wait")),
    ("kernels", "fsdp2", "leave"),
}
EXPECTED = {
    "kill": {"PeerDied"},
    "leave": {"PeerDied", "GroupAborted"},
    "raise": {"PeerDied", "GroupAborted"},  # the process ends with its exception
    "stop": {"PeerStalled", "CollectiveTimeout"},
}


def cases():
    for route in ("gloo", "kernels"):
        for mode in MODES:
            for how in EXPECTED:
                marks = [] if (route, mode, how) in QUICK else [pytest.mark.soak]
                yield pytest.param(route, mode, how, marks=marks, id=f"{route}-{mode}-{how}")


class Lose(torch.autograd.Function):
    """The identity, whose backward loses rank LOST."""

    how = ""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        lose()
        return grad


LOST = 1


def lose():
    if not Lose.how or dist.get_rank() != LOST:
        return
    if Lose.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if Lose.how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if Lose.how == "raise":
        raise LookupError("of the user's own code")
    dist.destroy_process_group()
    time.sleep(60)


def _plain(finish):
    def step():
        lose()
        finish(dist.all_reduce(torch.ones(5), async_op=True))

    return step


def _functional(world):
    x = of(0, (6,)).requires_grad_(True)

    def step():
        y = functional.all_gather_tensor_autograd(Lose.apply(x), 0, world)
        out = functional.reduce_scatter_tensor_autograd(y, "sum", 0, world)
        out.backward(torch.ones_like(out))  # torch 2.11 refuses the expanded gradient of out.sum()

    return step


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(21, 21), nn.Linear(21, 21)

    def forward(self, x):
        return self.b(Lose.apply(self.a(x))).sum()


def _fsdp2(world):
    from torch.distributed.fsdp import fully_shard

    net = Net()
    for module in (net.a, net.b, net):
        fully_shard(module)
    return lambda: net(of(0, (2, 21))).backward()


def _ddp(mode, world):
    more = {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}.get(mode, {})
    net = DistributedDataParallel(Net(), bucket_cap_mb=0.001, **more)
    if mode == "hook":
        net.register_comm_hook(world, default_hooks.allreduce_hook)
    if mode == "tricomm's hook":
        net.register_comm_hook(world, tricomm.ddp_hook)
    x = of(0, (2, 21))

    def step():
        if mode == "no_sync":
            with net.no_sync():
                net(x).backward()
        net(x).backward()

    return step


def _step(mode, world):
    if mode == "fsdp2":
        return _fsdp2(world)
    if mode == "functional":
        return _functional(world)
    if mode == "wait":
        return _plain(lambda work: work.wait())
    if mode == "future":
        return _plain(lambda work: work.get_future().wait())
    return _ddp(mode, world)


LIMIT = 8.0  # seconds a call


def survive(rank, world_size, tell, url, route, mode, how, without=""):
    """`without`: the protection that is taken away. Returns the error's class and text, and the seconds it took."""
    os.environ.update(TRICOMM_CPU=route, TRICOMM_ARENA_BYTES="262144")
    if without == "the future for the reducer":
        work_handles.PendingWork._for_reducer = work_handles.PendingWork._for_python
    if without:
        process_group.raise_in_backward = lambda work: None
    dist.init_process_group(
        "tricomm", init_method=url, rank=rank, world_size=world_size, timeout=timedelta(seconds=LIMIT)
    )
    step = _step(mode, dist.group.WORLD)
    if mode != "static":  # the first pass over a static graph has its own test
        step()
    dist.barrier()
    Lose.how = how
    tell(os.getpid())
    began = time.monotonic()
    try:
        for _ in range(3):
            step()
        outcome = ("nothing", "")
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    seconds = time.monotonic() - began
    if rank == LOST:
        return outcome
    others = [r for r in range(world_size) if r != LOST]
    ranks.together(url, rank, others)  # else one survivor may exit before the other one checks
    del step
    dist.destroy_process_group()
    again = others.index(rank)
    dist.init_process_group(
        "tricomm", init_method=url + "2", rank=again, world_size=world_size - 1, timeout=timedelta(seconds=60)
    )
    x = of(again, (7,))
    dist.all_reduce(x)
    assert torch.equal(x, sum(of(r, (7,)) for r in range(world_size - 1)))
    dist.destroy_process_group()
    return (*outcome, seconds)


WORLD = 3


def survivors(url, route, mode, how, without=""):
    with ranks.start(WORLD, survive, url, route, mode, how, without, timeout=150) as started:
        lost = started.messages()[LOST]
        waiting = [r for r in range(WORLD) if r != LOST]
        if how in ("stop", "leave"):
            outcomes = started.results(waiting)
            os.kill(lost, signal.SIGKILL)
        else:
            outcomes = started.results()
    return [outcomes[r] for r in waiting]


@pytest.mark.parametrize(("route", "mode", "how"), list(cases()))
def test_every_survivor_gets_the_named_error_and_keeps_running(route, mode, how, url):
    for outcome in survivors(url, route, mode, how):
        assert outcome.code is None and outcome.error is None, (outcome.code, outcome.text)
        kind, text, seconds = outcome.value
        if mode == "hook":  # C++ raises what a Python hook's future holds: the class is in the text
            assert kind == "RuntimeError" and any(name in text for name in EXPECTED[how])
        else:
            assert kind in EXPECTED[how], text
        assert f"[{LOST}]" in text or f"rank {LOST}" in text
        assert seconds < LIMIT + 10


def test_without_a_future_that_the_reducer_can_read_the_survivors_die(url):
    for outcome in survivors(url, "gloo", "plain", "kill", "the future for the reducer"):
        assert outcome.code == -signal.SIGSEGV


def test_without_the_callback_of_the_backward_pass_the_class_is_in_the_text_only(url):
    kinds: set[str] = set()
    for attempt in range(3):  # a rank that makes its call after the end is known has the class without any callback
        for outcome in survivors(f"{url}-{attempt}", "gloo", "plain", "kill", "the callback"):
            kind, text, _ = outcome.value
            assert kind == "PeerDied" or (kind == "RuntimeError" and "PeerDied: " in text), (kind, text)
            kinds.add(kind)
        if "RuntimeError" in kinds:
            return
    raise AssertionError(f"the callback is not needed: {kinds}")
