"""Ranks that train over a group: DDP in its forms, DTensor, functional collectives, compiled code, checkpoints."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import tricomm
from tests.c10d.bodies.groups import default_group, of, refused, same


def in_turn(rank, world_size, tell, url, cases):
    """Run the cases one after another, each over a new group; send each one's name and its result or error."""
    for number, (name, body, *args) in enumerate(cases):
        try:
            outcome = body(rank, world_size, tell, f"{url}{number}", *args)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        tell((name, outcome))


def model(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def batch(rank, step):
    return of(rank, (8, 6), call=step), of(rank, (8, 2), call=step + 500)


def _same_everywhere(net, world_size):
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    rows = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(rows, flat)
    return all(same(row, flat) for row in rows)


def _steps(net, rank, world_size, steps):
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        x, y = batch(rank, step)
        optimiser.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        optimiser.step()
        if not _same_everywhere(net, world_size):
            return f"step {step}: parameters differ"
    return None


def ddp(rank, world_size, tell, url, route, how, steps):
    """DDP, the same bits on all ranks after every step; and those of one process that sums in the same order."""
    with default_group(rank, world_size, url, route) as world:
        before = tricomm.stats()[route].get("all_reduce", 0)
        net = model(rank)  # DDP broadcasts rank 0's
        more = {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}.get(how, {})
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.0005, **more)
        if how == "hook":
            wrapped.register_comm_hook(None, tricomm.ddp_hook)
        elif how == "python hook":
            wrapped.register_comm_hook(world, default_hooks.allreduce_hook)
        elif how == "built-in hook":
            wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        fault = _steps(wrapped, rank, world_size, steps)
        if tricomm.stats()[route].get("all_reduce", 0) < before + steps:  # DDP's reducer calls from C++
            return f"the buckets went another way: {tricomm.stats()}"
        if fault:
            return fault
        return None if all(map(same, _reference(world_size, steps), net.parameters())) else "not the reference's bits"


def _reference(world_size, steps):
    """One process: every rank's gradient, added in rank order, divided; then the same step."""
    net = model(0)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        grads = []
        for rank in range(world_size):
            x, y = batch(rank, step)
            optimiser.zero_grad()
            ((net(x) - y) ** 2).mean().backward()
            grads.append([p.grad.clone() for p in net.parameters()])
        for i, p in enumerate(net.parameters()):
            p.grad = sum(g[i] for g in grads) / world_size
        optimiser.step()
    return list(net.parameters())


def uneven_join(rank, world_size, tell, url, divide_by_initial_world_size=True):
    """DDP's join: ranks with different numbers of batches."""
    with default_group(rank, world_size, url):
        wrapped = DistributedDataParallel(model())
        optimiser = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        with wrapped.join(divide_by_initial_world_size):
            for step in range(3 + 2 * rank):
                x, y = batch(rank, step)
                optimiser.zero_grad()
                ((wrapped(x) - y) ** 2).mean().backward()
                optimiser.step()
        return _same_everywhere(wrapped, world_size)


def dtensor(rank, world_size, tell, url, route):
    """A tensor-parallel MLP, and redistribution of every kind."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    wrong = []
    with default_group(rank, world_size, url, route):
        mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
        full = of(0, (world_size * 3 + 1, 4))
        x = distribute_tensor(full, mesh, [Shard(0)])
        wrong += [] if same(x.full_tensor(), full) else ["gather"]
        wrong += [] if same(x.redistribute(mesh, [Shard(1)]).full_tensor(), full) else ["shard to shard"]
        part = torch.distributed.tensor.DTensor.from_local(of(rank, (4, 4)), mesh, [Partial()])
        total = sum(of(r, (4, 4)) for r in range(world_size))
        wrong += [] if same(part.redistribute(mesh, [Replicate()]).to_local(), total) else ["partial"]
        wrong += [] if same(part.redistribute(mesh, [Shard(0)]).full_tensor(), total) else ["reduce_scatter"]
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8 * world_size), nn.ReLU(), nn.Linear(8 * world_size, 4))
        reference = copy.deepcopy(net)
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        data = of(7, (5, 4))
        wrong += [] if torch.allclose(net(data), reference(data), atol=1e-6) else ["tensor parallel"]
    return wrong


def functionals(rank, world_size, tell, url, route):
    wrong, wait = [], functional.wait_tensor
    with default_group(rank, world_size, url, route) as world:
        parts = [of(r, (2 * world_size, 3)) for r in range(world_size)]
        x, total = parts[rank], sum(parts)
        wrong += [] if same(wait(functional.all_reduce(x, "sum", world)), total) else ["all_reduce"]
        wrong += [] if same(wait(functional.all_reduce(x, "avg", world)), total / world_size) else ["avg"]
        wrong += [] if same(wait(functional.all_gather_tensor(x, 0, world)), torch.cat(parts)) else ["all_gather"]
        wrong += [] if same(wait(functional.all_gather_tensor(x, 1, world)), torch.cat(parts, 1)) else ["dim 1"]
        got = wait(functional.reduce_scatter_tensor(x, "sum", 0, world))
        wrong += [] if same(got, total[2 * rank : 2 * rank + 2]) else ["reduce_scatter"]
        got = wait(functional.all_to_all_single(x, None, None, world))
        wrong += [] if same(got, torch.cat([p[2 * rank : 2 * rank + 2] for p in parts])) else ["all_to_all"]
        wrong += [] if same(wait(functional.broadcast(x, 1, world)), parts[1]) else ["broadcast"]
        got = functional.all_reduce_coalesced([x, 2 * x], "sum", world)
        wrong += [] if same(wait(got[0]), total) and same(wait(got[1]), 2 * total) else ["coalesced"]
        got = functional.all_gather_into_tensor_coalesced([x, x[:1]], world)
        wrong += [] if same(wait(got[0]), torch.cat(parts)) else ["all_gather coalesced"]
        got = functional.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], world)
        wrong += [] if same(wait(got[1]), 2 * total[2 * rank : 2 * rank + 2]) else ["reduce_scatter coalesced"]
    return wrong


def compiled(rank, world_size, tell, url, backend):
    """fullgraph: functional collectives, dist.all_reduce, and torch.ops.tricomm with their gradients."""
    wrong = []
    with default_group(rank, world_size, url) as world:
        name = world.group_name
        parts = [of(r, (world_size, 3)) for r in range(world_size)]
        x, total = parts[rank], sum(parts)

        @torch.compile(fullgraph=True, backend=backend)
        def fc(x):
            return functional.all_reduce(x * 2, "sum", world) + 1

        @torch.compile(fullgraph=True, backend=backend)
        def c10d(x):
            y = x * 2
            dist.all_reduce(y)
            return y + 1

        @torch.compile(fullgraph=True, backend=backend)
        def ops(x):
            y = torch.ops.tricomm.all_reduce(x * 2, "sum", name)
            return torch.ops.tricomm.all_gather(y, name) + 1

        @torch.compile(fullgraph=True, backend=backend)
        def others(x):
            y = torch.ops.tricomm.reduce_scatter(x * 2, "sum", name)
            z = torch.ops.tricomm.broadcast(x + 1, 1, name)
            return y, z, torch.ops.tricomm.all_to_all(x - 1, [1] * world_size, [1] * world_size, name)

        @torch.compile(fullgraph=True, backend=backend)
        def in_place(x):
            y = x + 1
            torch.ops.tricomm.all_reduce_(y, "max", name)
            return y * 2

        y, z, w = others(x)
        wrong += [] if same(y, 2 * total[rank : rank + 1]) and same(z, parts[1] + 1) else ["reduce_scatter, broadcast"]
        wrong += [] if same(w, torch.stack([p[rank] for p in parts]) - 1) else ["all_to_all"]
        wrong += [] if same(in_place(x), 2 * (torch.stack(parts).amax(0) + 1)) else ["all_reduce_"]
        wrong += [] if same(fc(x), total * 2 + 1) else ["functional"]
        wrong += [] if same(c10d(x), total * 2 + 1) else ["dist.all_reduce"]
        leaf = x.clone().requires_grad_()
        out = ops(leaf)
        wrong += [] if same(out.detach(), torch.cat([total * 2 + 1] * world_size)) else ["ops"]
        out.sum().backward()
        wrong += [] if same(leaf.grad, torch.full_like(leaf, 2.0 * world_size * world_size**1)) else [leaf.grad]
    return wrong


def ops(rank, world_size, tell, url, route):
    """torch.ops.tricomm: values, gradients, opcheck, refusals."""
    wrong = []
    o = torch.ops.tricomm
    with default_group(rank, world_size, url, route) as world:
        name = world.group_name
        parts = [of(r, (2 * world_size, 3)) for r in range(world_size)]
        total, mine = sum(parts), slice(2 * rank, 2 * rank + 2)
        splits = [2] * world_size
        weights = [of(r, (2 * world_size, 3), call=9) for r in range(world_size)]
        for what, run, want, grad in [
            ("all_reduce", lambda x: o.all_reduce(x, "sum", name), total, sum(weights)),
            ("avg", lambda x: o.all_reduce(x, "avg", name), total / world_size, sum(weights) / world_size),
            (
                "broadcast",
                lambda x: o.broadcast(x, 1, name),
                parts[1],
                sum(weights) if rank == 1 else torch.zeros_like(total),
            ),
            (
                "all_to_all",
                lambda x: o.all_to_all(x, splits, splits, name),
                torch.cat([p[mine] for p in parts]),
                torch.cat([w[mine] for w in weights]),
            ),
        ]:
            x = parts[rank].clone().requires_grad_()
            out = run(x)
            (out * weights[rank]).sum().backward()
            wrong += [] if same(out.detach(), want) and same(x.grad, grad) else [what]
        x = parts[rank].clone().requires_grad_()
        out = o.all_gather(x, name)
        out.sum().backward()
        wrong += [] if same(out.detach(), torch.cat(parts)) and (x.grad == world_size).all() else ["all_gather"]
        x = parts[rank].clone().requires_grad_()
        out = o.reduce_scatter(x, "sum", name)
        (out * (rank + 1)).sum().backward()
        want = torch.cat([torch.full((2, 3), r + 1.0) for r in range(world_size)])
        wrong += [] if same(out.detach(), total[mine]) and same(x.grad, want) else ["reduce_scatter"]
        y = parts[rank].clone()
        o.all_reduce_(y, "max", name)
        wrong += [] if same(y, torch.stack(parts).amax(0)) else ["all_reduce_"]
        torch.library.opcheck(o.all_reduce, (parts[rank].clone().requires_grad_(), "sum", name))
        mine = parts[rank]
        for op, arguments in [
            (o.all_gather, (mine.clone(), name)),
            (o.reduce_scatter, (mine.clone(), "sum", name)),
            (o.broadcast, (mine.clone(), 0, name)),
            (o.all_to_all, (mine.clone(), splits, splits, name)),
        ]:
            torch.library.opcheck(op, arguments)
        refused(lambda: o.all_reduce(mine, "median", name), "median", "sum, avg")
        refused(lambda: o.reduce_scatter(mine[:1], "sum", name), "multiple of")
        leaf = mine.clone().requires_grad_()
        refused(lambda: o.all_reduce(leaf, "max", name), "no gradient", "detach")
    return wrong


def checkpoint(rank, world_size, tell, url, folder):
    import torch.distributed.checkpoint as dcp

    with default_group(rank, world_size, url):
        state = {"x": of(0, (5,)), "step": 3}
        dcp.save(state, checkpoint_id=folder)
        loaded = {"x": torch.zeros(5), "step": 0}
        dcp.load(loaded, checkpoint_id=folder)
        return same(loaded["x"], state["x"]) and loaded["step"] == 3
