"""Random calls of torch.distributed's default group, in the manner of `calls`; DDP's backward is one of them."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.c10d.bodies.groups import poisoned
from tests.soak.calls import NAMES, Call, Pairs, Turn, rows_for, sums


def kind(op: str) -> Any:
    return getattr(dist.ReduceOp, NAMES[op])


def done(work: Any, how: str) -> None:
    if how == "wait":
        work.wait()
    elif how == "future":
        work.get_future().wait()


def all_reduce(group: Any, turn: Turn) -> Pairs:
    dtype = turn.dtype()
    op, parts = turn.op(dtype), turn.parts((turn.count(),), dtype)
    how = turn.choices.choice(("sync", "wait", "future"))
    x = parts[turn.rank].clone()
    done(dist.all_reduce(x, kind(op), async_op=how != "sync"), how)
    return [(x, sums(parts, op))]


def several_at_once(group: Any, turn: Turn) -> Pairs:
    dtype = turn.dtype()
    parts = [turn.parts((turn.count(),), dtype, which) for which in range(3)]
    xs = [p[turn.rank].clone() for p in parts]
    for work in [dist.all_reduce(x, async_op=True) for x in xs]:
        work.wait()
    return [(x, sums(p, "sum")) for x, p in zip(xs, parts, strict=True)]


def all_gather(group: Any, turn: Turn) -> Pairs:
    dtype, shape = turn.dtype(), (turn.count(),)
    parts = turn.parts(shape, dtype)
    outs = [poisoned(shape, dtype) for _ in parts]
    dist.all_gather(outs, parts[turn.rank])
    flat = poisoned((shape[0] * turn.world_size,), dtype)
    dist.all_gather_into_tensor(flat, parts[turn.rank])
    return [*zip(outs, parts, strict=True), (flat, torch.cat(parts))]


def reduce_scatter(group: Any, turn: Turn) -> Pairs:
    dtype, rows = turn.dtype(), turn.count()
    op, parts = turn.op(dtype), turn.parts((rows * turn.world_size,), dtype)
    out = poisoned((rows,), dtype)
    dist.reduce_scatter_tensor(out, parts[turn.rank].clone(), kind(op))
    return [(out, sums(parts, op)[turn.rank * rows : (turn.rank + 1) * rows])]


def broadcast(group: Any, turn: Turn) -> Pairs:
    root, parts = turn.root(), turn.parts((turn.count(),), turn.dtype())
    x = parts[turn.rank].clone()
    dist.broadcast(x, root)
    return [(x, parts[root])]


def gather(group: Any, turn: Turn) -> Pairs:
    dtype, root, shape = turn.dtype(), turn.root(), (turn.count(),)
    parts = turn.parts(shape, dtype)
    outs = [poisoned(shape, dtype) for _ in parts] if turn.rank == root else None
    dist.gather(parts[turn.rank], outs, dst=root)
    return list(zip(outs, parts, strict=True)) if outs else []


def reduce(group: Any, turn: Turn) -> Pairs:
    dtype, root = turn.dtype(), turn.root()
    op, parts = turn.op(dtype), turn.parts((turn.count(),), dtype)
    x = parts[turn.rank].clone()
    dist.reduce(x, root, kind(op))
    return [(x, sums(parts, op))] if turn.rank == root else []


def scatter(group: Any, turn: Turn) -> Pairs:
    dtype, root, shape = turn.dtype(), turn.root(), (turn.count(),)
    parts, out = turn.parts(shape, dtype), poisoned(shape, dtype)
    dist.scatter(out, [p.clone() for p in parts] if turn.rank == root else None, src=root)
    return [(out, parts[turn.rank])]


def all_to_all(group: Any, turn: Turn) -> Pairs:
    dtype, splits, width = turn.dtype(), turn.splits(), turn.choices.choice((1, 5, 300))
    x = turn.part(turn.rank, (sum(splits[turn.rank]), width), dtype)
    takes = [splits[peer][turn.rank] for peer in range(turn.world_size)]
    out = poisoned((sum(takes), width), dtype)
    dist.all_to_all_single(out, x, takes, splits[turn.rank])
    return [(out, rows_for(turn, splits, width, dtype))]


def messages(group: Any, turn: Turn) -> Pairs:
    dtype, shape = turn.dtype(), (turn.count(),)
    following, before = (turn.rank + 1) % turn.world_size, (turn.rank - 1) % turn.world_size
    got = poisoned(shape, dtype)
    sent = dist.isend(turn.part(turn.rank, shape, dtype), following, tag=turn.number % 1000)
    dist.recv(got, before, tag=turn.number % 1000)
    sent.wait()
    return [(got, turn.part(before, shape, dtype))]


def barrier(group: Any, turn: Turn) -> Pairs:
    dist.barrier()
    return []


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
    all_reduce, several_at_once, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all, messages,
    backward, barrier, in_callbacks,
)  # fmt: skip
