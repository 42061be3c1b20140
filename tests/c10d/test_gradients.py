"""Tensors that require grad, and tensors that wrap other tensors: as over Gloo alone, on both routes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.two_tensor import TwoTensor

from tests import ranks
from tests.c10d.bodies.groups import ROUTES, default_group, of, poisoned, refused, same
from tricomm.c10d import cpu_calls


def gradients(rank, world_size, tell, url, route, without=False):
    if without:
        cpu_calls.torch = SimpleNamespace(**{**vars(torch), "no_grad": torch.enable_grad})
    wrong = []
    n = world_size
    with default_group(rank, n, url, route) as world:

        def check(name, run, want):
            try:
                if not same(run().detach(), want):
                    wrong.append(name)
            except RuntimeError as error:
                wrong.append(f"{name}: {error}")
                raise

        def leaf(shape, call):
            return of(rank, (shape,), call=call).requires_grad_(True)

        rows = [of(r, (2 * n,), call=1) for r in range(n)]
        total = sum(rows)
        mine = slice(2 * rank, 2 * rank + 2)
        check("all_reduce", lambda: functional.all_reduce(leaf(2 * n, 1), "sum", world), total)
        check("all_gather", lambda: functional.all_gather_tensor(leaf(2 * n, 1), 0, world), torch.cat(rows))
        check("reduce_scatter", lambda: functional.reduce_scatter_tensor(leaf(2 * n, 1), "sum", 0, world), total[mine])
        check("broadcast", lambda: functional.broadcast(leaf(2 * n, 1), 0, world), rows[0])

        x = leaf(2 * n, 2)
        (functional.reduce_scatter_tensor_autograd(x * 3, "sum", 0, world) * (rank + 1)).sum().backward()
        check("reduce_scatter's gradient", lambda: x.grad, torch.arange(1.0, n + 1).repeat_interleave(2) * 3)
        x = leaf(3, 3)
        (functional.all_gather_tensor_autograd(x * 3, 0, world) * (rank + 1)).sum().backward()
        check("all_gather's gradient", lambda: x.grad, torch.full((3,), 3.0 * n * (n + 1) / 2))

        x = leaf(3, 4)
        dist.all_reduce(x)  # in place, of a leaf
        check("in place", lambda: x, sum(of(r, (3,), call=4) for r in range(n)))
        out = poisoned((3 * n,))
        dist.all_gather_into_tensor(out, leaf(3, 5))
        check("into a tensor", lambda: out, torch.cat([of(r, (3,), call=5) for r in range(n)]))

        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (n,))
        whole = torch.arange(8.0 * n).reshape(2 * n, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_(True)
        full = sharded.full_tensor()
        check("full_tensor", lambda: full, whole)
        full.sum().backward()
        check("full_tensor's gradient", lambda: sharded.grad.to_local(), torch.ones(2, 4))
    return wrong


@pytest.mark.parametrize("route", ROUTES)
def test_tensors_that_require_grad(route, url):
    assert ranks.run(2, gradients, url, route) == [[], []]


def test_with_grad_mode_on_in_the_worker_they_are_refused(url):
    with ranks.start(2, gradients, url, "kernels", True) as started:
        assert any(outcome.error == "InvalidArgument" for outcome in started.results())


def _none(shape):
    return TwoTensor(poisoned(shape), poisoned(shape))


def _two(rank, shape, call):
    return TwoTensor(of(rank, shape, call=call), of(rank, shape, call=call + 100))


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(2, [])
def test_tensors_that_wrap_other_tensors(rank, world_size, tell, url, route):
    wrong = []
    n = world_size
    with default_group(rank, n, url, route) as world:

        def check(name, given, want):
            if not (same(given.a, want(0)) and same(given.b, want(100))):
                wrong.append(name)

        x = _two(rank, (5,), 1)
        dist.all_reduce(x)
        check("all_reduce", x, lambda more: sum(of(r, (5,), call=1 + more) for r in range(n)))
        x = _two(rank, (5,), 2)
        dist.broadcast(x, 1, async_op=True).wait()
        check("broadcast", x, lambda more: of(1, (5,), call=2 + more))
        outs = [_none((3,)) for _ in range(n)]
        dist.all_gather(outs, _two(rank, (3,), 3))
        for r, out in enumerate(outs):
            check(f"all_gather of {r}", out, lambda more, r=r: of(r, (3,), call=3 + more))
        out = _none((2,))
        dist.reduce_scatter_tensor(out, _two(rank, (2 * n,), 4))
        check(
            "reduce_scatter",
            out,
            lambda more: sum(of(r, (2 * n,), call=4 + more) for r in range(n))[2 * rank : 2 * rank + 2],
        )
        if rank == 0:
            dist.send(_two(0, (4,), 5), 1)
        elif rank == 1:
            out = _none((4,))
            dist.recv(out, 0)
            check("recv", out, lambda more: of(0, (4,), call=5 + more))
        if rank < 2:  # of a batch, too, next to a plain tensor
            out, plain = _none((4,)), poisoned((4,))
            ops = [(dist.isend, _two(0, (4,), 7), 1), (dist.isend, of(0, (4,), call=8), 1)]
            ops = ops if rank == 0 else [(dist.irecv, out, 0), (dist.irecv, plain, 0)]
            for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, peer) for op, tensor, peer in ops]):
                work.wait()
            if rank == 1:
                check("batch", out, lambda more: of(0, (4,), call=7 + more))
                wrong += [] if same(plain, of(0, (4,), call=8)) else ["plain tensor of a batch"]
        y = functional.all_reduce(_two(rank, (5,), 6), "sum", world) + 0
        check("functional", y, lambda more: sum(of(r, (5,), call=6 + more) for r in range(n)))
        z = functional.all_reduce(of(rank, (5,), call=7), "sum", world)  # wraps a call that is under way
        dist.all_reduce(z)
        if not same(z + 0, n * sum(of(r, (5,), call=7) for r in range(n))):
            wrong.append("a functional collective's result")
        from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

        d = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (n,)), [Replicate()])
        refused(lambda: dist.all_reduce(d), "DTensor", "to_local")
        x = of(rank, (3,))
        dist.all_reduce(x)
        assert same(x, sum(of(r, (3,)) for r in range(n)))
    return wrong
