"""Random calls of torch.distributed's default group: the fuzz's calls, and backward passes of DDP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.soak import fuzz_calls
from tests.soak.calls import Call, Pairs, Turn

MANY = (
    fuzz_calls.manager,
    fuzz_calls.functionals,
    fuzz_calls.objects,
)  # a call of several collectives, any of which may be the last


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
    """A step of DDP over two layers of integers. Inputs are multiples of the world size, so the mean is exact."""
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


CALLS: tuple[Call, ...] = (*(of_the_fuzz(kind) for kind in fuzz_calls.KINDS if kind not in MANY), backward)
