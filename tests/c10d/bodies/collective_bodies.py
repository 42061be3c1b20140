"""Every collective of c10d, each against what it must give."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.c10d.bodies.groups import default_group, of, poisoned, same
from tricomm.errors import CollectiveMismatch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIGNED, UNSIGNED = ([getattr(torch, f"{kind}{bits}") for bits in (64, 32, 16, 8)] for kind in ("int", "uint"))
TYPES = [*FLOATS, *SIGNED, *reversed(UNSIGNED), torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]


def wanted(parts, op, dtype):
    """The reduction, in numbers that hold it exactly."""
    if dtype == torch.bool:
        fold = {
            "SUM": torch.logical_or,
            "MAX": torch.logical_or,
            "BOR": torch.logical_or,
            "MIN": torch.logical_and,
            "PRODUCT": torch.logical_and,
            "BAND": torch.logical_and,
            "BXOR": torch.logical_xor,
        }[op]
        wide = parts
    else:
        wide = [p.to(torch.float64 if dtype.is_floating_point else torch.int64) for p in parts]
        fold = {
            "SUM": torch.add,
            "AVG": torch.add,
            "MIN": torch.minimum,
            "MAX": torch.maximum,
            "PRODUCT": torch.mul,
            "BAND": torch.bitwise_and,
            "BOR": torch.bitwise_or,
            "BXOR": torch.bitwise_xor,
        }[op]
    total = wide[0]
    for part in wide[1:]:
        total = fold(total, part)
    if op == "AVG":
        total = total.div(len(parts), rounding_mode=None if dtype.is_floating_point else "trunc")
    return total.to(dtype)


def defined(op, dtype):
    if dtype == torch.bool:
        return op != "AVG"
    return not (dtype.is_floating_point and op[0] == "B")


def reductions(rank, world_size, tell, url, route, step=1):
    """all_reduce, reduce and reduce_scatter of every type, with every `step`th of all pairs of type and operation."""
    wrong, pairs = [], [(dtype, op) for dtype in TYPES for op in OPS if defined(op, dtype)]
    with default_group(rank, world_size, url, route):
        for call, (dtype, op) in enumerate(pairs[::step], 1):
            kind = getattr(dist.ReduceOp, op)
            parts = [of(r, (5,), dtype, call) for r in range(world_size)]
            x = parts[rank].clone()
            dist.all_reduce(x, kind)
            if not same(x, wanted(parts, op, dtype)):
                wrong.append(("all_reduce", str(dtype), op))
            x = parts[rank].clone()
            root = call % world_size
            dist.reduce(x, root, kind)
            if rank == root and not same(x, wanted(parts, op, dtype)):
                wrong.append(("reduce", str(dtype), op))
            wide = [of(r, (3 * world_size,), dtype, call) for r in range(world_size)]
            out = poisoned((3,), dtype)
            dist.reduce_scatter_tensor(out, wide[rank].clone(), kind)
            if not same(out, wanted(wide, op, dtype)[3 * rank : 3 * rank + 3]):
                wrong.append(("reduce_scatter", str(dtype), op))
    return wrong


def premultiplied(rank, world_size, tell, url, route):
    """PREMUL_SUM by every call that reduces. What is no output, or is refused, keeps its values."""
    wrong, factor = [], 4.0
    with default_group(rank, world_size, url, route) as group:

        def check(what, result, want):
            if not same(result, want):
                wrong.append(f"{what}: {result.tolist()} and not {want.tolist()}")

        op = dist._make_nccl_premul_sum(factor)
        for call, dtype in enumerate((torch.float32, torch.float64, torch.float16, torch.bfloat16)):
            parts = [of(r, (2 * world_size,), dtype, call) for r in range(world_size)]
            total = wanted([factor * part for part in parts], "SUM", dtype)
            mine = slice(2 * rank, 2 * rank + 2)
            x, spread = parts[rank].clone(), torch.zeros(2 * world_size, 2, dtype=dtype)
            dist.all_reduce(x, op)
            check("all_reduce", x, total)
            spread[:, 0] = parts[rank]
            dist.all_reduce(spread[:, 0], op)
            check("all_reduce with gaps", spread[:, 0], total)
            x = parts[rank].clone()
            dist.reduce(x, 1, op)
            check("reduce", x, total if rank == 1 else parts[rank])
            y = poisoned((2,), dtype)
            dist.reduce_scatter(y, list(parts[rank].clone().chunk(world_size)), op)
            check("reduce_scatter", y, total[mine])
            y, x = poisoned((2,), dtype), parts[rank].clone()
            dist.reduce_scatter_tensor(y, x, op)
            check("reduce_scatter_tensor", y, total[mine])
            check("its input", x, parts[rank])
            several = [parts[rank].clone(), parts[rank][:3].clone()]
            opts = dist.AllreduceCoalescedOptions()
            opts.reduceOp = op
            group.allreduce_coalesced(several, opts).wait()
            check("all_reduce_coalesced", torch.cat(several), torch.cat([total, total[:3]]))
            ys = [poisoned((2,), dtype), poisoned((1,), dtype)]
            opts = dist.ReduceScatterOptions()
            opts.reduceOp = op
            group.reduce_scatter_tensor_coalesced(
                ys, [parts[rank].clone(), parts[rank][:world_size].clone()], opts
            ).wait()
            check("reduce_scatter_tensor_coalesced", torch.cat(ys), torch.cat([total[mine], total[rank : rank + 1]]))
        x = torch.ones(3)
        works = [dist.all_reduce(x, o, async_op=True) for o in (dist.ReduceOp.SUM, dist._make_nccl_premul_sum(0.5))]
        for work in works:
            work.wait()
        check("calls in their order", x, torch.full((3,), 0.5 * world_size**2))
        several = [x.fill_(1.0), x]
        opts = dist.AllreduceCoalescedOptions()
        opts.reduceOp = dist._make_nccl_premul_sum(torch.tensor([[2.0]]))
        group.allreduce_coalesced(several, opts).wait()
        check("one tensor twice", x, torch.full((3,), 2.0 * world_size))  # each from the inputs
        x = torch.full((2 + rank % 2,), 3.0)
        try:
            dist.all_reduce(x, op)
            wrong.append("ranks with other counts")
        except CollectiveMismatch:
            check("after a mismatch", x, torch.full_like(x, 3.0))
    return wrong


def one_element(rank, world_size, tell, url, route):
    """One element, or none, is contiguous with any stride."""
    wrong = []
    with default_group(rank, world_size, url, route):
        dist.all_reduce(torch.ones(3, 4)[:0, 1])
        dist.all_gather([torch.ones(3, 4)[:0, 1] for _ in range(world_size)], torch.ones(3, 4)[:0, 1])
        total = torch.tensor([sum(range(1, world_size + 1))])
        for dtype in (torch.float32, torch.int16, torch.bool, torch.uint64, torch.complex64):
            x = torch.full((3, 4), rank + 1).to(dtype)
            dist.all_reduce(x[:1, 1])
            wrong += [] if same(x[:1, 1], total.to(dtype)) else [f"all_reduce of {dtype}"]
            rows = [poisoned((3, 2), dtype)[:1, 0] for _ in range(world_size)]
            dist.all_gather(rows, torch.full((3, 4), rank + 1).to(dtype)[:1, 1])
            if not same(torch.cat(rows), torch.arange(1, world_size + 1).to(dtype)):
                wrong.append(f"all_gather of {dtype}")
        z = torch.tensor([1 + (2 + rank) * 1j])
        dist.all_reduce(z.conj().imag)
        want = 1 + sum(2 + r for r in range(world_size)) * 1j
        wrong += [] if same(z, torch.tensor([want])) else [f"the negative of a half: {z}"]
    return wrong


def movements(rank, world_size, tell, url, route, step=1):
    """Everything that moves data and does not reduce it, of every type, with shapes of 0 to 3 dimensions.

    With every `step`th of all pairs of type and shape.
    """
    wrong, pairs = [], [(dtype, shape) for dtype in TYPES for shape in ((4, 3), (1,), (), (2, 1, 3), (0,))]
    with default_group(rank, world_size, url, route):
        for call, (dtype, shape) in enumerate(pairs[::step]):
            parts = [of(r, shape, dtype, call) for r in range(world_size)]
            root = call % world_size
            got = []
            x = parts[rank].clone()
            dist.broadcast(x, root)
            got.append((x, parts[root]))
            outs = [poisoned(shape, dtype) for _ in range(world_size)]
            dist.all_gather(outs, parts[rank])
            got += zip(outs, parts, strict=True)
            flat = poisoned((world_size, *shape), dtype)
            dist.all_gather_into_tensor(flat, parts[rank].view(1, *shape))
            got.append((flat, torch.stack(parts)))
            outs = [poisoned(shape, dtype) for _ in range(world_size)] if rank == root else None
            dist.gather(parts[rank], outs, dst=root)
            got += zip(outs or [], parts, strict=False)
            out = poisoned(shape, dtype)
            dist.scatter(out, [p.clone() for p in parts] if rank == root else None, src=root)
            got.append((out, parts[rank]))
            outs = [poisoned(shape, dtype) for _ in range(world_size)]
            dist.all_to_all(outs, [of(rank, shape, dtype, 50 + p) for p in range(world_size)])
            got += zip(outs, [of(r, shape, dtype, 50 + rank) for r in range(world_size)], strict=True)
            wrong += [(str(dtype), shape, i) for i, (a, b) in enumerate(got) if not same(a, b)]
    return wrong


def uneven(rank, world_size, tell, url, route):
    """Sizes that differ between ranks: all_to_all of both kinds, all_gather, reduce_scatter."""
    wrong = []
    with default_group(rank, world_size, url, route):
        send = [rank + 2 * peer for peer in range(world_size)]
        receive = [peer + 2 * rank for peer in range(world_size)]
        rows = [of(rank, (n, 2), call=p) for p, n in enumerate(send)]
        want = [of(p, (n, 2), call=rank) for p, n in enumerate(receive)]
        out = poisoned((sum(receive), 2))
        dist.all_to_all_single(out, torch.cat(rows), receive, send)
        if not same(out, torch.cat(want)):
            wrong.append("all_to_all_single")
        outs = [poisoned(w.shape) for w in want]
        dist.all_to_all(outs, rows)
        if not all(map(same, outs, want)):
            wrong.append("all_to_all")
        outs = [poisoned((r + 1,)) for r in range(world_size)]
        dist.all_gather(outs, of(rank, (rank + 1,)))
        if not all(same(o, of(r, (r + 1,))) for r, o in enumerate(outs)):
            wrong.append("all_gather")
        parts = [[of(r, (n + 1,), call=n) for n in range(world_size)] for r in range(world_size)]
        out = poisoned((rank + 1,))
        dist.reduce_scatter(out, parts[rank])
        if not same(out, sum(p[rank] for p in parts)):
            wrong.append("reduce_scatter")
        outs = [poisoned((3,)) for _ in range(world_size)]  # even here says nothing about the others
        dist.all_to_all_single(torch.cat(outs), torch.arange(3.0 * world_size), [3] * world_size, [3] * world_size)
    return wrong


def strided(rank, world_size, tell, url, route):
    """Tensors that are not contiguous, that require grad, that are views; in and out of no_grad."""
    wrong = []
    parts = [of(r, (6, 4)) for r in range(world_size)]
    total = sum(parts)
    with default_group(rank, world_size, url, route):
        x = parts[rank].clone().t()
        dist.all_reduce(x)
        wrong += [] if same(x, total.t()) else ["transposed"]
        base = parts[rank].clone()
        dist.all_reduce(base[:, 1])
        want = parts[rank].clone()
        want[:, 1] = total[:, 1]
        wrong += [] if same(base, want) else ["column"]
        base = parts[rank].clone()
        dist.broadcast(base[::2], 1)
        want = parts[rank].clone()
        want[::2] = parts[1][::2]
        wrong += [] if same(base, want) else ["rows"]
        leaf = parts[rank].clone().requires_grad_()
        dist.all_reduce(leaf)
        wrong += [] if same(leaf.detach(), total) and leaf.requires_grad else ["leaf"]
        with torch.no_grad():
            x = parts[rank].clone()
            dist.all_reduce(x)
            wrong += [] if same(x, total) else ["no_grad"]
        outs = [poisoned((4, 6)).t() for _ in range(world_size)]
        dist.all_gather(outs, parts[rank])
        wrong += [] if all(map(same, outs, parts)) else ["all_gather"]
        sparse = torch.eye(4)[rank].to_sparse()
        dist.all_reduce(sparse)
        wrong += [] if same(sparse.to_dense(), torch.eye(4)[:world_size].sum(0)) else ["sparse"]
    return wrong


def coalesced(rank, world_size, tell, url, route):
    """Coalesced calls, the coalescing manager, barriers, objects."""
    wrong = []
    mine = [of(rank, (n,), call=n) for n in (3, 7, 1)]
    totals = [sum(of(r, (n,), call=n) for r in range(world_size)) for n in (3, 7, 1)]
    with default_group(rank, world_size, url, route) as world:
        xs = [x.clone() for x in mine]
        world.allreduce_coalesced(xs).wait()
        wrong += [] if all(map(same, xs, totals)) else ["allreduce_coalesced"]
        xs = [x.clone() for x in mine]
        with dist._coalescing_manager(async_ops=True) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        wrong += [] if all(map(same, xs, totals)) else ["manager all_reduce"]
        xs = [x.clone() for x in mine]
        with dist._coalescing_manager(device=torch.device("cpu")):
            for x in xs:
                dist.broadcast(x, 0)
        wrong += [] if all(same(x, of(0, x.shape, call=len(x))) for x in xs) else ["manager broadcast"]
        outs = [poisoned((world_size * len(x),)) for x in mine]
        with dist._coalescing_manager():
            for out, x in zip(outs, mine, strict=True):
                dist.all_gather_into_tensor(out, x)
        want = [torch.cat([of(r, x.shape, call=len(x)) for r in range(world_size)]) for x in mine]
        wrong += [] if all(map(same, outs, want)) else ["manager all_gather"]
        outs = [poisoned((1,)) for _ in range(2)]
        wide = [[of(r, (world_size,), call=c) for r in range(world_size)] for c in range(2)]
        with dist._coalescing_manager():
            for out, parts in zip(outs, wide, strict=True):
                dist.reduce_scatter_tensor(out, parts[rank])
        wrong += (
            [] if all(same(o, sum(p)[rank : rank + 1]) for o, p in zip(outs, wide, strict=True)) else ["manager rs"]
        )
        lists = [[poisoned(x.shape) for x in mine] for _ in range(world_size)]
        world.allgather_coalesced(lists, mine).wait()
        ok = all(same(row[i], of(r, x.shape, call=len(x))) for r, row in enumerate(lists) for i, x in enumerate(mine))
        wrong += [] if ok else ["allgather_coalesced"]
        dist.barrier()
        dist.barrier(async_op=True).wait()
        world.monitored_barrier()
        results = [None] * world_size
        dist.all_gather_object(results, {"rank": rank})
        wrong += [] if results == [{"rank": r} for r in range(world_size)] else ["all_gather_object"]
        box = [("from", rank)]
        dist.broadcast_object_list(box, src=1)
        wrong += [] if box == [("from", 1)] else ["broadcast_object_list"]
        gathered = [None] * world_size if rank == 0 else None
        dist.gather_object(rank * 2, gathered)
        wrong += [] if gathered in (None, [2 * r for r in range(world_size)]) else ["gather_object"]
        got = [None]
        dist.scatter_object_list(got, [str(r) for r in range(world_size)] if rank == 0 else None)
        wrong += [] if got == [str(rank)] else ["scatter_object_list"]
    return wrong


def unseen(rank, world_size, tell, url, route):
    """No call changes the version by which autograd sees that a tensor was written to: NCCL's do not."""
    wrong = []
    with default_group(rank, world_size, url, route):

        def check(name, call, *written):
            before = [x._version for x in written]
            call()
            if before != [x._version for x in written]:
                wrong.append(name)

        x, gaps, wide = torch.ones(2), torch.ones(2, 2)[:, 0], torch.ones(2 * world_size)
        outs = list(torch.zeros(world_size, 2).unbind())
        check("all_reduce", lambda: dist.all_reduce(x), x)
        check("all_reduce with gaps", lambda: dist.all_reduce(gaps), gaps)
        check("broadcast", lambda: dist.broadcast(x, 0), x)
        check("all_gather", lambda: dist.all_gather(outs, x), *outs)
        check("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(wide, x), wide)
        check("reduce_scatter", lambda: dist.reduce_scatter(x, list(wide.chunk(world_size))), x)
        check("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(x, wide), x)
        check("gather", lambda: dist.gather(x, outs if rank == 0 else None), *outs)
        check("scatter", lambda: dist.scatter(x, outs if rank == 0 else None), x)
        check("all_to_all", lambda: dist.all_to_all(outs, list(wide.chunk(world_size))), *outs)
        check("all_to_all_single", lambda: dist.all_to_all_single(wide.clone(), wide), wide)
        check("message", lambda: dist.send(x, 1) if rank == 0 else dist.recv(x), x)
        saved = torch.ones(2, requires_grad=True)
        hidden = saved.relu()  # whose gradient needs what relu gave
        dist.all_reduce(hidden)
        hidden.sum().backward()
        wrong += [] if saved.grad.tolist() == [1.0, 1.0] else ["gradient"]
    return wrong
