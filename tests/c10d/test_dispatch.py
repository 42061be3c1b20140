"""The choice of a route is a pure function of arguments that are the same on all ranks."""

from __future__ import annotations

import contextlib
import io
import os
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group
from tricomm import errors
from tricomm.c10d import capabilities, dispatch, message_collectives
from tricomm.c10d.group_calls import GroupCall
from tricomm.errors import ResourceError
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.policy import backend_choice
from tricomm.policy.backend_choice import GroupFacts, decide
from tricomm.store import process
from tricomm.store.records import Capabilities

GPU = GroupFacts("cuda", 8, 1, None, "nccl")
CPU = GroupFacts("cpu", 2, 1, None, "gloo")


@pytest.mark.parametrize(
    ("site", "call", "path", "word"),
    [
        (GPU, ("all_reduce", torch.float32, "sum", 4096), "kernels", "cover"),
        (GPU, ("all_reduce", torch.float32, "sum", 8 << 20), "kernels", "cover"),
        (GPU, ("all_reduce", torch.float32, "sum", (8 << 20) + 4), "nccl", "NCCL threshold"),
        (GPU, ("all_reduce", torch.complex32, "sum", 8), "nccl", "complex32"),
        (GPU, ("all_reduce", torch.float32, "premul_sum", 8), "nccl", "premul_sum"),
        (GPU, ("send", torch.float32, "none", 8), "nccl", "two ranks"),
        (GPU, ("barrier", None, "none", 0), "kernels", "cover"),
        (GroupFacts("cuda", 16, 2, None, "nccl"), ("all_reduce", torch.float32, "sum", 8), "nccl", "2 nodes"),
        (
            GroupFacts("cuda", 8, 1, "no peer access", "nccl"),
            ("all_reduce", torch.float32, "sum", 8),
            "nccl",
            "no peer",
        ),
        (GroupFacts("cpu", 2, 1, "CPU tensors", "gloo"), ("barrier", None, "none", 0), "gloo", "CPU tensors"),
        (CPU, ("all_reduce", torch.float32, "sum", 1 << 30), "kernels", "cover"),
        (CPU, ("all_gather_v", torch.float32, "none", None), "gloo", "no all_gather_v kernel"),
    ],
)
def test_routes(site, call, path, word):
    route = decide(site, *call)
    assert route.backend == path and word in route.reason


def test_a_refusal_without_a_fallback_says_why():
    with pytest.raises(errors.InvalidArgument, match="complex32.*no backend for it"):
        decide(GroupFacts("cuda", 8, 1, None, None), "all_reduce", torch.complex32, "sum", 8)


BY_KERNELS = sorted(set(COLLECTIVES) - {"all_to_all"})  # an even all-to-all runs the kernel of the uneven one


def test_every_collective_has_a_kernel():
    for collective in BY_KERNELS:
        op = "sum" if collective in backend_choice.REDUCTIONS else "none"
        assert decide(CPU, collective, torch.float32, op, None).backend == "kernels"


def test_an_operation_that_a_type_lacks_is_not_routed_to_the_kernels():
    assert decide(CPU, "all_reduce", torch.complex64, "prod", 8).backend == "gloo"
    assert decide(CPU, "all_reduce", torch.complex64, "sum", 8).backend == "kernels"


def test_every_call_that_is_routed_to_the_kernels_has_one():
    for collective in BY_KERNELS:
        comm = Mock()
        dispatch._by_kernels(comm, GroupCall(collective, torch.ones(2), torch.ones(2), splits=([2], [2])))
        assert [name for name, *_ in comm.method_calls] == [collective]
    assert set(BY_KERNELS) <= set(message_collectives.TABLE)


def member(node=b"n" * 16, flags=0b1111, pid=1):
    return Capabilities(pid, 0, 0, node, flags, 1000)


@pytest.mark.parametrize(
    ("said", "nodes", "cpu", "cuda", "check"),
    [
        ([member(), member()], 1, True, True, True),
        ([member(), member(b"m" * 16)], 2, True, True, True),
        ([member(), member(flags=0b1110)], 1, False, True, True),  # only one rank has TRICOMM_CPU=kernels
        ([member(), member(flags=0b1011)], 1, True, False, True),
        ([member(), member(flags=0b0111)], 1, False, True, True),
        ([member(), member(flags=0b1101)], 1, True, True, False),
    ],
)
def test_all_ranks_conclude_the_same_from_their_records(said, nodes, cpu, cuda, check):
    for order in (said, said[::-1]):
        agreed = capabilities._conclude(order, None)
        assert (agreed.nodes, agreed.check) == (nodes, check)
        assert (agreed.no_kernels["cpu"] is None, agreed.no_kernels["cuda"] is None) == (cpu, cuda)


def test_node_id(monkeypatch):
    mine = process.node_id()
    monkeypatch.setenv("TRICOMM_NODE_ID", "rack 7")
    assert process.node_id() != mine and len(process.node_id()) == 16


def test_an_unknown_cpu_route_is_refused(monkeypatch):
    monkeypatch.setenv("TRICOMM_CPU", "mpi")
    with pytest.raises(errors.InvalidArgument, match="TRICOMM_CPU='mpi': kernels or gloo"):
        capabilities.cpu_through_kernels()


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


@pytest.mark.parametrize("route", ["gloo", "kernels"])
def test_each_distinct_call_is_printed_once_and_every_call_counted(route, url):
    for rank, (lines, counted) in enumerate(ranks.run(2, logged, url, route)):
        assert counted == {"all_reduce": 5, "barrier": 1}
        assert len(lines) == (0 if rank else 3)
        if not rank:
            assert all(f"-> {route}: " in line for line in lines)
            assert route == "gloo" or "one_shot/ll, 1 block of 8 warps, tiles of" in lines[0]
            assert sum("all_reduce sum float32 16 B" in line for line in lines) == 1
            assert sum("all_reduce max int64 16 B" in line for line in lines) == 1


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


def test_groups_across_nodes_use_gloo_and_groups_within_a_node_the_kernels(url):
    for rank, (whole, part, other, text) in enumerate(ranks.run(4, two_nodes, url)):
        assert whole == other == {"gloo": 1, "kernels": 0} and part == {"gloo": 0, "kernels": 1}
        assert text.count("-> gloo: the group spans 2 nodes") == (0 if rank else 2)


@ranks.each(2, ("gloo", 2.0))
def test_all_ranks_use_gloo_if_only_one_asks_for_kernels(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels" if rank == 1 else "gloo"):
        x = torch.ones(3)
        moved = _moved(lambda: dist.all_reduce(x))
        return max(moved, key=moved.get), x[0].item()


def handshake_fails(rank, world_size, tell, url):
    os.environ["TRICOMM_LOG"] = "routing"

    def no_memory(*args, **more):
        raise ResourceError("no memory here")

    dispatch.Communicator._behind = no_memory
    with default_group(rank, world_size, url, "kernels") as world:
        x = torch.ones(3)
        for _ in range(2):
            dist.all_reduce(x)
        return tricomm.stats()["gloo"], world._dispatcher.router(torch.device("cpu")).facts.no_kernels


def test_ranks_without_shared_memory_agree_on_gloo(url):
    for counted, text in ranks.run(2, handshake_fails, url):
        assert counted == {"all_reduce": 2} and "cannot share memory" in text and "no memory here" in text
