"""Rank functions for the tests of batch-invariant groups; the sum of their inputs depends on the order of addition."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import tricomm
from tests.c10d.bodies.groups import default_group, refused, same
from tricomm.kernels import reference

COUNT = 70_001  # beyond what Gloo's route sends in one shot


def numbers(rank, count=COUNT, dtype=torch.float32):
    draw = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=draw) * 2.0 ** torch.randint(-6, 7, (count,), generator=draw)).to(dtype)


def bits_of_every_way(rank, world_size, tell, url, route, count):
    """Names of the ways to reduce a tensor whose bits are not those of rank order."""
    os.environ["TRICOMM_BATCH_INVARIANT"] = "1"
    wrong = []
    with default_group(rank, world_size, url, route) as group:
        assert group.batch_invariant
        del os.environ["TRICOMM_BATCH_INVARIANT"]  # which is read when a group is made
        parts = [numbers(r, count) for r in range(world_size)]
        total, mean = (reference.reduced(op, parts) for op in ("sum", "avg"))
        mine = parts[rank]
        assert not same(total, reference.reduced("sum", parts[::-1]))

        def look(name, result, wanted=total):
            wrong.extend([] if same(result, wanted) else [name])

        x = mine.clone()
        dist.all_reduce(x)
        look("all_reduce", x)
        for _ in range(3):
            x = mine.clone()
            dist.all_reduce(x)
        look("repeated", x)
        cut = [x.clone() for x in mine.split([1, 13, count - 14])]
        for work in [dist.all_reduce(x, async_op=True) for x in cut]:
            work.wait()
        look("in parts", torch.cat(cut))
        group.allreduce_coalesced([cut[n].copy_(x) for n, x in enumerate(mine.split([1, 13, count - 14]))]).wait()
        look("coalesced", torch.cat(cut))
        x = mine.clone()
        dist.all_reduce(x, dist.ReduceOp.AVG)
        look("avg", x, mean)
        x = mine.clone()
        dist.reduce(x, 1)
        look("reduce", x, total if rank == 1 else mine)
        sizes = [5, 0, count - 5]
        out = torch.empty(sizes[rank])
        dist.reduce_scatter(out, list(mine.split(sizes)))
        look("uneven reduce_scatter", out, total.split(sizes)[rank])
        even = count // 3 * 3
        out = torch.empty(even // 3)
        dist.reduce_scatter_tensor(out, mine[:even].clone())
        look("reduce_scatter", out, total[:even].chunk(3)[rank])
        look("torch.ops", torch.ops.tricomm.all_reduce(mine, "sum", group.group_name))
        look("functional", functional.all_reduce(mine, "sum", group).clone())
        # Types that no kernel takes are reduced from messages, also in rank order.
        x = torch.full((3,), rank + 1, dtype=torch.uint16)
        dist.all_reduce(x)
        look("uint16", x, torch.full((3,), 6, dtype=torch.uint16))
        z = torch.ones(4, dtype=torch.complex64)
        product = torch.ops.tricomm.all_reduce  # dist.all_reduce refuses it for every backend
        refused(lambda: product(z, "prod", group.group_name), "prod of complex64", "batch-invariant", "all_gather")
        refused(lambda: dist.all_reduce(torch.eye(2).to_sparse()), "all_reduce_sparse", "to_dense()")
        dist.all_reduce(z)  # a refusal costs the group nothing
        look("complex", z, torch.full((4,), 3.0, dtype=torch.complex64))
        assert all(comm.options.batch_invariant for comm in group._dispatcher._comms.values())
    return wrong


def over_other_backends(rank, world_size, tell, url):
    """Another backend's group under the variable: wrapped it keeps the promise, else torch.ops refuses it."""
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    group = dist.group.WORLD
    other = dist.new_group(backend="gloo")
    without = tricomm.wrap(other)
    wrong, parts = [], [numbers(r) for r in range(world_size)]
    total, mean = (reference.reduced(op, parts) for op in ("sum", "avg"))
    asked = tricomm.Options(batch_invariant=True)
    for made in (other, without):
        refused(lambda made=made: tricomm.wrap(made, asked), "made without", "TRICOMM_BATCH_INVARIANT=1")
    assert not without.batch_invariant and tricomm.wrap(other) is without
    os.environ["TRICOMM_BATCH_INVARIANT"] = "1"
    for call in (torch.ops.tricomm.all_reduce, torch.ops.tricomm.reduce_scatter):
        refused(
            lambda call=call: call(torch.ones(6), "sum", group.group_name), "another backend", "tricomm.wrap(group)"
        )
    gathered = torch.ops.tricomm.all_gather(torch.ones(2), group.group_name)  # moves, and reduces nothing
    assert gathered.tolist() == [1.0] * 2 * world_size
    wrapped = tricomm.wrap(group, asked)
    assert wrapped.batch_invariant and tricomm.wrap(group) is wrapped
    x = torch.ops.tricomm.all_reduce(parts[rank], "sum", wrapped.group_name)
    wrong += [] if same(x, total) else ["wrapped"]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(COUNT, 1, bias=False), process_group=group)
    model.register_comm_hook(None, tricomm.ddp_hook)
    model(parts[rank]).backward()
    wrong += [] if same(model.module.weight.grad.view(-1), mean) else ["hook"]
    dist.destroy_process_group(wrapped)
    dist.destroy_process_group()
    return wrong


def one_differs(rank, world_size, tell, url):
    if rank == 1:
        os.environ["TRICOMM_BATCH_INVARIANT"] = "1"

    def group():
        with default_group(rank, world_size, url):
            pass

    return refused(
        group, "rank(s) [1] ask for a batch-invariant group, rank(s) [0, 2] do not", kind=tricomm.RendezvousError
    )
