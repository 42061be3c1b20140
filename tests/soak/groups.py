"""One small interface to the three kinds of group in the soak."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import tricomm
from tests.soak import c10d_calls, calls
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


class OnC10d:
    calls: tuple[Call, ...] = c10d_calls.CALLS

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
