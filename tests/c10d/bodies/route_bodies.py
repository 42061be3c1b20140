"""What ranks do in the tests of routes."""

from __future__ import annotations

import contextlib
import io
import os

import torch
import torch.distributed as dist

import tricomm
from tests.c10d.bodies.groups import default_group
from tricomm.c10d import dispatch
from tricomm.errors import ResourceError


def _printed(body):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        body()
    return [line for line in out.getvalue().splitlines() if line.startswith("tricomm routing")]


def logged(rank, world_size, tell, url, route):
    os.environ["TRICOMM_LOG"] = "routing"

    def calls():
        for _ in range(4):
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.MAX)
        dist.barrier()

    with default_group(rank, world_size, url, route):
        return _printed(calls), tricomm.stats()[route]


def _moved(body):
    before = tricomm.stats()
    body()
    after = tricomm.stats()
    return {p: sum(after[p].values()) - sum(before[p].values()) for p in ("gloo", "kernels")}


def two_nodes(rank, world_size, tell, url):
    """Ranks 0, 1 on one node, 2, 3 on another, as far as TRICOMM_NODE_ID goes."""
    os.environ["TRICOMM_NODE_ID"] = f"node {rank // 2}"
    os.environ["TRICOMM_LOG"] = "routing"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    results = []
    with default_group(rank, world_size, url, "kernels"):
        mine, _ = dist.new_subgroups(2)
        x, y, z = torch.ones(3), torch.ones(3), torch.full((3,), float(rank))
        lines = _printed(lambda: results.append(_moved(lambda: dist.all_reduce(x))))
        results.append(_moved(lambda: dist.all_reduce(y, group=mine)))
        lines += _printed(lambda: results.append(_moved(lambda: dist.broadcast(z, 2))))
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert (x[0], y[0], z[0]) == (4, 2, 2)
    return *results, " ".join(lines)


def one_wants_kernels(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels" if rank == 1 else "gloo"):
        x = torch.ones(3)
        moved = _moved(lambda: dist.all_reduce(x))
        return max(moved, key=moved.get), x[0].item()


def handshake_fails(rank, world_size, tell, url):
    """The communicator cannot be made: the group says so and goes on with Gloo."""
    os.environ["TRICOMM_LOG"] = "routing"

    def no_memory(*args, **more):
        raise ResourceError("no memory here")

    dispatch.Communicator._behind = no_memory
    with default_group(rank, world_size, url, "kernels") as world:
        x = torch.ones(3)
        for _ in range(2):
            dist.all_reduce(x)
        return tricomm.stats()["gloo"], world._dispatcher.router(torch.device("cpu")).facts.no_kernels
