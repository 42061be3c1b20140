"""Random calls of a communicator, each with the result that it must give, computed by torch from all ranks' data.

A call is a function of the group and a `Turn`; it returns pairs of results and expected values. All ranks draw
the same choices from the turn's generator, because it has the same seed everywhere; the data differ by rank and call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.c10d.bodies.groups import of, poisoned, wanted
from tests.core.bodies.exact import anything, outcome
from tricomm.kernels.collectives import registry

COUNTS = (1, 2, 7, 64, 1000, 3001)  # never 17: that is the count of a wrong call
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
OPS = ("sum", "min", "max", "prod")
NAMES = {"sum": "SUM", "min": "MIN", "max": "MAX", "prod": "PRODUCT", "avg": "AVG", "bxor": "BXOR"}

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Call = Callable[[Any, "Turn"], Pairs]


@dataclass
class Turn:
    """One call: its rank, its number, which seeds its data, and the choices that all ranks share."""

    rank: int
    world_size: int
    number: int
    choices: random.Random

    def part(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, which: int = 0) -> torch.Tensor:
        """The input of `rank` to this call."""
        return of(rank, shape, dtype, self.number * 16 + which)

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype, which: int = 0) -> list[torch.Tensor]:
        return [self.part(rank, shape, dtype, which) for rank in range(self.world_size)]

    def count(self) -> int:
        return self.choices.choice(COUNTS)

    def dtype(self) -> torch.dtype:
        return self.choices.choice(DTYPES)

    def op(self, dtype: torch.dtype) -> str:
        return self.choices.choice(OPS if dtype.is_floating_point else (*OPS, "avg", "bxor"))

    def splits(self) -> list[list[int]]:
        """The number of rows that each rank sends to each; may be 0."""
        return [[self.choices.randrange(4) for _ in range(self.world_size)] for _ in range(self.world_size)]


def sums(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    return wanted(parts, NAMES[op], parts[0].dtype)


def lists(comm: Any, turn: Turn) -> Pairs:
    dtype = turn.dtype()
    shapes = [(turn.count(),), (3, 5), (turn.count(),)]
    op, parts = turn.op(dtype), [turn.parts(shape, dtype, which) for which, shape in enumerate(shapes)]
    xs = [p[turn.rank].clone() for p in parts]
    comm.all_reduce(xs, op)
    gathered = comm.all_gather([p[turn.rank] for p in parts])
    pairs = [(x, sums(p, op)) for x, p in zip(xs, parts, strict=True)]
    return pairs + [(x, torch.cat(p)) for x, p in zip(gathered, parts, strict=True)]


def by_any_kernel(collective: str) -> Call:
    """A call with random size, type and tensor arguments, on a random kernel."""
    kernels = [k for k in registry.KERNELS if k.collective == collective and not k.needs_cube]

    def call(comm: Any, turn: Turn) -> Pairs:
        case = anything(turn.choices, turn.choices.choice(kernels))
        return [(torch.tensor([outcome(comm, case, turn.number)]), torch.tensor([True]))]

    call.__name__ = collective
    return call


def all_to_all_v(comm: Any, turn: Turn) -> Pairs:
    dtype, splits, width = turn.dtype(), turn.splits(), turn.choices.choice((1, 5, 300))
    x = turn.part(turn.rank, (sum(splits[turn.rank]), width), dtype)
    takes = [splits[peer][turn.rank] for peer in range(turn.world_size)]
    out = poisoned((sum(takes), width), dtype)
    comm.all_to_all_v(x, splits[turn.rank], takes, out=out)
    return [(out, rows_for(turn, splits, width, dtype))]


def rows_for(turn: Turn, splits: list[list[int]], width: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows that this rank receives if rank p sends `splits[p][r]` rows to rank r."""
    rows = []
    for peer in range(turn.world_size):
        theirs = turn.part(peer, (sum(splits[peer]), width), dtype)
        rows.append(theirs.split(splits[peer])[turn.rank])
    return torch.cat(rows)


def messages(comm: Any, turn: Turn) -> Pairs:
    """Round a ring, even ranks first; a tag per call."""
    dtype, shape = turn.dtype(), (turn.count(),)
    following, before = (turn.rank + 1) % turn.world_size, (turn.rank - 1) % turn.world_size
    x, got, tag = turn.part(turn.rank, shape, dtype), poisoned(shape, dtype), turn.number % 1000
    send = lambda: comm.send(x, following, tag)  # noqa: E731
    recv = lambda: comm.recv(got, before, tag)  # noqa: E731
    for step in (send, recv) if turn.rank % 2 == 0 else (recv, send):
        step()
    return [(got, turn.part(before, shape, dtype))]


def barrier(comm: Any, turn: Turn) -> Pairs:
    comm.barrier()
    return []


SIMPLE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all")
CALLS: tuple[Call, ...] = (*map(by_any_kernel, SIMPLE), lists, all_to_all_v, messages, barrier)
