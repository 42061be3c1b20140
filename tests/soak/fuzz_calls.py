"""Every kind of call of torch.distributed with its right result, for `fuzz`; its choices follow from its path."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from tests.c10d.bodies.groups import OPS, TYPES, defined, of, poisoned, wanted
from tests.soak.calls import Pairs

COUNTS = (0, 1, 2, 7, 64, 1000, 3001)
SHAPES = ((), (4, 3), (2, 1, 3))
REDUCTIONS = [(dtype, op) for dtype in TYPES for op in OPS if defined(op, dtype)]


@dataclass
class Turn:
    """A call: its group, this rank's place in it, and the choices and data that follow from its path.

    `pair`: the type and operation, if they are not drawn.
    """

    group: Any
    members: list[int]
    me: int
    path: tuple[int, ...]
    seed: int
    pair: tuple[torch.dtype, str] | None = None
    choices: random.Random = field(init=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.choices = random.Random(f"{self.seed} {self.path}")
        self.number = zlib.crc32(repr(self.path).encode()) % (1 << 20)

    @property
    def size(self) -> int:
        return len(self.members)

    def count(self) -> int:
        return self.choices.choice(COUNTS)

    def dtype(self) -> torch.dtype:
        return self.pair[0] if self.pair else self.choices.choice([*TYPES, torch.complex64])

    def shape(self) -> tuple[int, ...]:
        return self.choices.choice([*SHAPES, *((count,) for count in COUNTS)])

    def root(self) -> int:
        return self.choices.randrange(self.size)

    def reduction(self) -> tuple[torch.dtype, str]:
        return self.pair or self.choices.choice(REDUCTIONS)

    def part(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, which: int = 0) -> torch.Tensor:
        return of(rank, shape, dtype, self.number * 8 + which)

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype, which: int = 0) -> list[torch.Tensor]:
        return [self.part(rank, shape, dtype, which) for rank in range(self.size)]


@dataclass
class Made:
    """A call that can be started, with `async_op` or without, and its pairs of result and right result."""

    start: Callable[[bool], Any]
    pairs: Pairs
    future: bool = True  # its handle has a future


def reduce_op(op: str) -> Any:
    return getattr(dist.ReduceOp, op)


def all_reduce(t: Turn) -> Made:
    dtype, op = t.reduction()
    parts = t.parts(t.shape(), dtype)
    x = parts[t.me].clone()
    if t.choices.random() < 0.2:
        x = torch.stack([x, x], -1)[..., 0]  # with gaps
    return Made(lambda a: dist.all_reduce(x, reduce_op(op), t.group, a), [(x, wanted(parts, op, dtype))])


def all_reduce_coalesced(t: Turn) -> Made:
    dtype, op = t.reduction()
    parts = [t.parts((t.count(),), dtype, which) for which in range(3)]
    xs = [p[t.me].clone() for p in parts]
    pairs = [(x, wanted(p, op, dtype)) for x, p in zip(xs, parts, strict=True)]
    return Made(lambda a: dist.all_reduce_coalesced(xs, reduce_op(op), t.group, a), pairs)


def broadcast(t: Turn) -> Made:
    root, parts = t.root(), t.parts(t.shape(), t.dtype())
    x = parts[t.me].clone()
    return Made(lambda a: dist.broadcast(x, t.members[root], t.group, a), [(x, parts[root])])


def reduce(t: Turn) -> Made:
    (dtype, op), root = t.reduction(), t.root()
    parts = t.parts(t.shape(), dtype)
    x = parts[t.me].clone()
    pairs = [(x, wanted(parts, op, dtype))] if t.me == root else []
    return Made(lambda a: dist.reduce(x, t.members[root], reduce_op(op), t.group, a), pairs)


def all_gather(t: Turn) -> Made:
    dtype = t.dtype()
    counts = [t.count() for _ in t.members] if t.choices.random() < 0.3 else [t.count()] * t.size
    parts = [t.part(rank, (count,), dtype) for rank, count in enumerate(counts)]
    outs = [poisoned((count,), dtype) for count in counts]
    return Made(lambda a: dist.all_gather(outs, parts[t.me], t.group, a), list(zip(outs, parts, strict=True)))


def all_gather_into_tensor(t: Turn) -> Made:
    dtype, rows = t.dtype(), t.count()
    parts, out = t.parts((rows, 2), dtype), poisoned((rows * t.size, 2), dtype)
    x = parts[t.me]
    if t.choices.random() < 0.3:  # in place
        x = out[t.me * rows : (t.me + 1) * rows]
        x.copy_(parts[t.me])
    return Made(lambda a: dist.all_gather_into_tensor(out, x, t.group, a), [(out, torch.cat(parts))])


def gather(t: Turn) -> Made:
    dtype, root, shape = t.dtype(), t.root(), t.shape()
    parts = t.parts(shape, dtype)
    outs = [poisoned(shape, dtype) for _ in parts] if t.me == root else None
    pairs = list(zip(outs, parts, strict=True)) if outs else []
    return Made(lambda a: dist.gather(parts[t.me], outs, t.members[root], t.group, a), pairs)


def scatter(t: Turn) -> Made:
    dtype, root, shape = t.dtype(), t.root(), t.shape()
    parts, out = t.parts(shape, dtype), poisoned(shape, dtype)
    given = parts if t.me == root else None
    return Made(lambda a: dist.scatter(out, given, t.members[root], t.group, a), [(out, parts[t.me])])


def reduce_scatter(t: Turn) -> Made:
    dtype, op = t.reduction()
    counts = [t.count() for _ in t.members] if t.choices.random() < 0.3 else [t.count()] * t.size
    lists = [[t.part(rank, (count,), dtype, which) for which, count in enumerate(counts)] for rank in range(t.size)]
    out = poisoned((counts[t.me],), dtype)
    want = wanted([given[t.me] for given in lists], op, dtype)
    return Made(lambda a: dist.reduce_scatter(out, lists[t.me], reduce_op(op), t.group, a), [(out, want)])


def reduce_scatter_tensor(t: Turn) -> Made:
    (dtype, op), rows = t.reduction(), t.count()
    parts, out = t.parts((rows * t.size,), dtype), poisoned((rows,), dtype)
    want = wanted(parts, op, dtype)[t.me * rows : (t.me + 1) * rows]
    return Made(lambda a: dist.reduce_scatter_tensor(out, parts[t.me], reduce_op(op), t.group, a), [(out, want)])


def all_to_all(t: Turn) -> Made:
    dtype = t.dtype()
    counts = [[t.choices.randrange(5) for _ in t.members] for _ in t.members]  # [from][to]
    given = [t.part(t.me, (counts[t.me][to],), dtype, to) for to in range(t.size)]
    want = [t.part(other, (counts[other][t.me],), dtype, t.me) for other in range(t.size)]
    outs = [poisoned(tuple(x.shape), dtype) for x in want]
    return Made(lambda a: dist.all_to_all(outs, given, t.group, a), list(zip(outs, want, strict=True)))


def all_to_all_single(t: Turn) -> Made:
    dtype, width = t.dtype(), t.choices.choice((1, 5, 300))
    splits = [[t.choices.randrange(4) for _ in t.members] for _ in t.members]
    parts = [t.part(rank, (sum(splits[rank]), width), dtype) for rank in range(t.size)]
    takes = [splits[other][t.me] for other in range(t.size)]
    out = poisoned((sum(takes), width), dtype)
    want = torch.cat([part.split(splits[other])[t.me] for other, part in enumerate(parts)])
    x = parts[t.me]
    return Made(lambda a: dist.all_to_all_single(out, x, takes, splits[t.me], t.group, a), [(out, want)])


def barrier(t: Turn) -> Made:
    return Made(lambda a: dist.barrier(t.group, a), [])


class Works:
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def messages(t: Turn) -> Made:
    """Messages round a ring of the group, in one of three forms."""
    dtype, shape, way = t.dtype(), (t.count(),), t.choices.choice(("messages", "any source", "batch"))
    following, before = t.members[(t.me + 1) % t.size], t.members[(t.me - 1) % t.size]
    x, got = t.part(t.me, shape, dtype), poisoned(shape, dtype)

    def start(async_op: bool) -> Any:
        if way == "batch":
            ops = [
                dist.P2POp(dist.isend, x, following, t.group, t.number),
                dist.P2POp(dist.irecv, got, before, t.group, t.number),
            ]
            works = Works(dist.batch_isend_irecv(ops))
        else:
            source = None if way == "any source" else before
            sent = dist.isend(x, following, t.group, t.number)
            works = Works([sent, dist.irecv(got, source, t.group, t.number)])
        return works if async_op else works.wait()

    return Made(start, [(got, t.part((t.me - 1) % t.size, shape, dtype))], future=False)


def manager(t: Turn) -> Made:
    dtype, op = t.reduction()
    parts = [t.parts((t.count(),), dtype, which) for which in range(2)]
    xs = [p[t.me].clone() for p in parts]

    def start(async_op: bool) -> Any:
        with c10d._coalescing_manager(t.group, async_ops=async_op) as works:
            for x in xs:
                dist.all_reduce(x, reduce_op(op), t.group)
        return works

    return Made(start, [(x, wanted(p, op, dtype)) for x, p in zip(xs, parts, strict=True)], future=False)


def functionals(t: Turn) -> Made:
    parts = t.parts((t.count(),), torch.float32)
    out = poisoned(tuple(parts[0].shape))

    def start(async_op: bool) -> Any:
        out.copy_(functional.wait_tensor(functional.all_reduce(parts[t.me], "sum", t.group)))

    return Made(start, [(out, wanted(parts, "SUM", torch.float32))], future=False)


def objects(t: Turn) -> Made:
    """Objects whose length differs by rank; each number that is received is a pair."""
    numbers, root = torch.arange(t.size) * 100 + t.number, t.root()
    way, got = t.choices.choice(("all_gather", "broadcast", "gather", "scatter")), torch.full((t.size,), -1)
    mine = (int(numbers[t.me]), "x" * (t.me * 50))
    want = numbers[t.me : t.me + 1].expand(t.size) if way == "scatter" else numbers
    want = numbers[root : root + 1].expand(t.size) if way == "broadcast" else want

    def start(async_op: bool) -> Any:
        found: list[Any] = [None] * t.size
        if way == "all_gather":
            dist.all_gather_object(found, mine, t.group)
        elif way == "gather":
            dist.gather_object(mine, found if t.me == root else None, t.members[root], t.group)
        elif way == "broadcast":
            found = [mine if t.me == root else None] * t.size
            dist.broadcast_object_list(found, t.members[root], t.group)
        else:
            given = [(int(number), "") for number in numbers] if t.me == root else None
            one: list[Any] = [None]
            dist.scatter_object_list(one, given, t.members[root], t.group)
            found = one * t.size
        if way != "gather" or t.me == root:
            got.copy_(torch.tensor([number for number, _ in found]))

    return Made(start, [(got, want.contiguous())] if way != "gather" or t.me == root else [], future=False)


# Every kind of call, and whether it has an operation.
KINDS: dict[Callable[[Turn], Made], bool] = {
    all_reduce: True,
    all_reduce_coalesced: True,
    broadcast: False,
    reduce: True,
    all_gather: False,
    all_gather_into_tensor: False,
    gather: False,
    scatter: False,
    reduce_scatter: True,
    reduce_scatter_tensor: True,
    all_to_all: False,
    all_to_all_single: False,
    barrier: False,
    messages: False,
    manager: True,
    functionals: False,
    objects: False,
}
