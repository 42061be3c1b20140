"""One small interface to the three kinds of group in the soak, and the random calls of torch.distributed's.

These are the fuzz's calls, and backward passes of DDP.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tricomm
from tests.soak import calls, fuzz_calls
from tests.soak.calls import Call, Pairs, Turn

ROUTES = ("communicator", "gloo", "kernels")


@dataclass(frozen=True)
class Where:
    """A group to make: its route, this rank in it, and the file of its store."""

    route: str
    rank: int
    world_size: int
    path: str
    timeout: float
    stall: float

    def store(self) -> Any:
        return dist.FileStore(self.path, self.world_size)

    def options(self) -> tricomm.Options:
        return tricomm.Options(arena_bytes=256 * 1024, timeout=self.timeout, stall_timeout=self.stall)


def halves(world_size: int) -> tuple[list[int], list[int]]:
    """Sub-groups: the first two ranks, and the others."""
    return list(range(2)), list(range(2, world_size))


class OnCommunicator:
    calls: tuple[Call, ...] = calls.CALLS

    def __init__(self, where: Where) -> None:
        options = where.options()
        self._comm = tricomm.Communicator(where.store(), where.rank, where.world_size, "cpu", options=options)
        self._parts = [self._comm.split(ranks) for ranks in halves(where.world_size)]

    def run(self, call: Call, turn: Turn) -> Pairs:
        return call(self._comm, turn)

    def part(self, turn: Turn) -> Pairs:
        """A call of the sub-group that this rank is in."""
        x = torch.full((turn.count(),), float(turn.rank + 1))
        members = next(ranks for ranks in halves(turn.world_size) if turn.rank in ranks)
        next(part for part in self._parts if part is not None).all_reduce(x)
        return [(x, torch.full_like(x, float(sum(rank + 1 for rank in members))))]

    def highest(self, value: int) -> int:
        """The highest `value` of all ranks."""
        x = torch.tensor([value], dtype=torch.int32)
        self._comm.all_reduce(x, "max")
        return int(x.item())

    def wrong_calls(self) -> list[Callable[[], Any]]:
        """Make calls that no other rank makes."""
        comm, x = self._comm, torch.ones(17)
        return [
            lambda: comm.all_reduce(x),
            lambda: comm.all_gather(x),
            lambda: comm.broadcast(x, 0),
            lambda: comm.all_reduce(x, "max"),
            lambda: comm.all_reduce(x.int()),
            lambda: comm.all_to_all_v(
                torch.ones(17 * comm.world_size, 17), [17] * comm.world_size, [17] * comm.world_size
            ),
        ]

    def close(self) -> None:
        for part in (*self._parts, self._comm):
            if part is not None:
                part.close()


# Of several collectives, any of which may be the last one of a call.
_MANY = (fuzz_calls.manager, fuzz_calls.functionals, fuzz_calls.objects)


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


C10D_CALLS: tuple[Call, ...] = (*(of_the_fuzz(kind) for kind in fuzz_calls.KINDS if kind not in _MANY), backward)


class OnC10d:
    calls: tuple[Call, ...] = C10D_CALLS

    def __init__(self, where: Where) -> None:
        self._where = where
        os.environ["TRICOMM_CPU"] = where.route
        os.environ["TRICOMM_ARENA_BYTES"] = str(256 * 1024)
        store, limit = where.store(), timedelta(seconds=where.timeout)
        for turn in range(2):  # made again over the same store
            dist.init_process_group(
                "tricomm",
                store=store,
                rank=where.rank,
                world_size=where.world_size,
                timeout=limit,
                pg_options=where.options(),
            )
            if turn == 0:
                dist.all_reduce(torch.ones(3))
                dist.destroy_process_group()
        self._parts = [
            dist.new_group(ranks, timeout=limit, pg_options=where.options()) for ranks in halves(where.world_size)
        ]
        for group in (None, self._parts[where.rank > 1]):  # a group's first call needs the store
            dist.all_reduce(torch.ones(3), group=group)

    def run(self, call: Call, turn: Turn) -> Pairs:
        return call(None, turn)

    def part(self, turn: Turn) -> Pairs:
        number = turn.rank > 1
        x = torch.full((turn.count(),), float(turn.rank + 1))
        dist.all_reduce(x, group=self._parts[number])
        return [(x, torch.full_like(x, float(sum(rank + 1 for rank in halves(turn.world_size)[number]))))]

    def highest(self, value: int) -> int:
        x = torch.tensor([value], dtype=torch.int32)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x.item())

    def wrong_calls(self) -> list[Callable[[], Any]]:
        x, ranks = torch.ones(17), self._where.world_size
        return [
            lambda: dist.all_reduce(x),
            lambda: dist.all_gather([torch.ones(17)] * ranks, x),
            lambda: dist.broadcast(x, 0),
            lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
            lambda: dist.all_reduce(x.int()),
        ]

    def close(self) -> None:
        dist.destroy_process_group()


def make(where: Where) -> OnCommunicator | OnC10d:
    return OnCommunicator(where) if where.route == "communicator" else OnC10d(where)
