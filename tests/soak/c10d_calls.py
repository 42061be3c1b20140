"""Random calls of torch.distributed's default group: the fuzz's, DDP's backward, and calls in callbacks of futures."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.soak import fuzz_calls
from tests.soak.calls import Call, Pairs, Turn, sums

MANY = (fuzz_calls.manager, fuzz_calls.functionals, fuzz_calls.objects)  # of several collectives, each of which may end


def of_the_fuzz(kind: Callable[[fuzz_calls.Turn], fuzz_calls.Made]) -> Call:
    @functools.wraps(kind)
    def call(group: Any, turn: Turn) -> Pairs:
        members = list(range(turn.world_size))
        made = kind(fuzz_calls.Turn(dist.group.WORLD, members, turn.rank, (turn.number,), 0))
        work = made.start(True)
        if work is not None:
            work.wait()
        return made.pairs

    return call


def backward(group: Any, turn: Turn) -> Pairs:
    """A step of DDP over two layers of whole numbers. Inputs are multiples of the world size, so the mean is exact."""
    shapes, size = ((6, 5), (3, 6)), (4, 5)
    weights = [turn.part(99, shape, torch.float32, which) for which, shape in enumerate(shapes)]
    layers = [torch.nn.Linear(shape[1], shape[0], bias=False) for shape in shapes]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data.copy_(weight)
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1e-5)
    xs = [turn.world_size * x for x in turn.parts(size, torch.float32)]
    model(xs[turn.rank]).sum().backward()
    want = [torch.zeros(shape) for shape in shapes]
    for x in xs:
        here = x @ weights[0].t()
        ones = torch.ones(size[0], shapes[1][0])
        want[0] += ((ones @ weights[1]).t() @ x) / turn.world_size
        want[1] += (ones.t() @ here) / turn.world_size
    return [(layer.weight.grad, grad) for layer, grad in zip(layers, want, strict=True)]


def in_callbacks(group: Any, turn: Turn) -> Pairs:
    """Calls of one shape, which the program and callbacks make; a rank may attach the callbacks late, or run them
    slowly."""
    parts = [turn.parts((turn.count(),), torch.float32, 0)]
    parts += [turn.parts(tuple(parts[0][0].shape), torch.float32, which) for which in range(1, 5)]
    xs = [p[turn.rank].clone() for p in parts]
    alone = random.Random(turn.number * 16 + turn.rank)
    late, slow = alone.random() < 0.5, alone.random() * 0.02

    def call(which: int) -> Any:
        def callback(future: Any) -> None:
            time.sleep(slow)
            dist.all_reduce(xs[which])

        return callback

    first, second = (dist.all_reduce(x, async_op=True) for x in xs[:2])
    if late:
        second.wait()
    chain = first.get_future().then(call(2)).then(call(3))
    both = torch.futures.collect_all([second.get_future(), first.get_future()]).then(call(4))
    for future in (chain, both):
        future.wait()
    for work in (first, second):
        work.wait()
    return [(x, sums(p, "sum")) for x, p in zip(xs, parts, strict=True)]


CALLS: tuple[Call, ...] = (
    *(of_the_fuzz(kind) for kind in fuzz_calls.KINDS if kind not in MANY),
    backward,
    in_callbacks,
)
