"""Calls of torch's process groups in a program: they are exact, or are refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import init_device_mesh

import tricomm
from tricomm.errors import InvalidArgument

BOTH = pytest.mark.parametrize("compiled", ["none", None])


def full(count, value):
    return torch.full((count,), float(value), device="cuda")


def numbers(tensors):
    return [tensor.tolist() for tensor in tensors]


def exchanges():
    """Lists of tensors that differ in size, and one tensor in uneven parts."""
    r, n = dist.get_rank(), dist.get_world_size()
    theirs = [torch.full((s + 1,), -1.0, device="cuda") for s in range(n)]
    dist.all_to_all(theirs, [full(r + 1, 10 * r + p) for p in range(n)])
    assert numbers(theirs) == [[10.0 * s + r] * (s + 1) for s in range(n)]
    whole = torch.full((sum(range(n)) + n * (r + 1),), -1.0, device="cuda")
    sent, got = [r + p + 1 for p in range(n)], [s + r + 1 for s in range(n)]
    dist.all_to_all_single(whole, torch.cat([full(k, p) for p, k in enumerate(sent)]), got, sent)
    assert whole.tolist() == [float(r)] * sum(got)
    mine = torch.full((2,), -1.0, device="cuda")
    dist.scatter(mine, [full(2, p) for p in range(n)] if r == 1 else None, src=1)
    assert mine.tolist() == [r, r]
    parts = [torch.full((2,), -1.0, device="cuda") for _ in range(n)] if r == 2 else None
    dist.gather(mine, parts, dst=2)
    assert parts is None or numbers(parts) == [[s, s] for s in range(n)]
    share = torch.full((1,), -1.0, device="cuda")
    dist.reduce_scatter(share, [full(1, r + p) for p in range(n)])
    assert share.item() == sum(range(n)) + n * r


def objects():
    given = [dist.get_rank()]
    dist.broadcast_object_list(given, 2)
    assert given == [2]


def methods():
    """The group's own methods, and functional collectives."""
    r, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = full(1, r)
    assert funcol.all_reduce(x, "sum", group).tolist() == [6.0] and x.item() == r
    assert funcol.broadcast(x, 3, group).tolist() == [3.0]
    assert funcol.all_gather_tensor(x, 0, group).tolist() == [float(p) for p in range(n)]
    assert funcol.reduce_scatter_tensor(torch.arange(4.0, device="cuda"), "sum", 0, group).tolist() == [4.0 * r]
    group.broadcast(x, 3).wait()
    group.allreduce(x).wait()
    group.allreduce([x], dist.ReduceOp.MAX).wait()
    assert x.item() == 12


def subgroups():
    r = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    assert halves[1 - r % 2] is dist.GroupMember.NON_GROUP_MEMBER
    mine, x = halves[r % 2], full(1, r)
    assert dist.get_rank(mine) == r // 2 and dist.get_world_size(mine) == 2
    dist.all_reduce(x, group=mine)
    assert x.item() == 2 + 2 * (r % 2)
    dist.broadcast(x, src=2 + r % 2, group=mine)
    pair, _ = dist.new_subgroups(2)
    assert dist.get_process_group_ranks(pair) == [r // 2 * 2, r // 2 * 2 + 1]
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("across", "along"))
    y = full(1, r)
    dist.all_reduce(y, group=mesh["across"].get_group())
    assert y.item() == 2 * (r % 2) + 2
    everybody = dist.new_group()
    handle = symm_mem.rendezvous(symm_mem.empty(4, device="cuda"), everybody)
    assert (handle.rank, handle.world_size) == (r, 4)
    dist.destroy_process_group(pair)
    dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@BOTH
@pytest.mark.parametrize("program", [exchanges, objects, methods, subgroups])
def test_a_call_is_exact(program, compiled):
    tricomm.simulate(program, 4, compiled=compiled)


def test_a_group_of_some_ranks_orders_their_accesses_alone():
    def program(ordered):
        rank = dist.get_rank()
        handle = symm_mem.rendezvous(symm_mem.empty(4, dtype=torch.int32, device="cuda").fill_(rank), dist.group.WORLD)
        pair = dist.new_group([0, 1])
        if rank == 0:
            handle.get_buffer(0, (4,), torch.int32).fill_(7)
        if ordered and rank < 2:
            dist.barrier(pair)
        if rank == 1:
            handle.get_buffer(0, (4,), torch.int32).tolist()

    assert tricomm.check(lambda: program(True), 3, schedules=4).ok
    assert tricomm.check(lambda: program(False), 3, schedules=4).findings[0].kind == "race"


def some_ranks_memory():
    pair = dist.new_group([0, 1])
    memory = symm_mem.empty(4, device="cuda")
    symm_mem.rendezvous(memory, pair) if dist.get_rank() < 2 else dist.barrier(pair)


REFUSED = {
    "torch.ops.symm_mem.one_shot_all_reduce is not": lambda: torch.ops.symm_mem.one_shot_all_reduce(
        symm_mem.empty(4, device="cuda"), "sum", "0"
    ),
    "_c10d_functional.all_reduce_coalesced is not": lambda: torch.ops._c10d_functional.all_reduce_coalesced(
        [torch.ones(1, device="cuda")], "sum", "0"
    ),
    "recv_anysource of torch's process group": lambda: dist.recv(torch.ones(1, device="cuda")),
    "send of torch's process group": lambda: dist.send(torch.ones(1, device="cuda"), 0),
    "BAND is not simulated": lambda: dist.all_reduce(torch.ones(1, device="cuda"), dist.ReduceOp.BAND),
}


@pytest.mark.parametrize("text", REFUSED)
def test_unsupported_calls_are_refused_with_their_line(text):
    with pytest.raises(InvalidArgument, match=rf"test_groups\.py:\d+: .*{text}"):
        tricomm.check(REFUSED[text], 2, schedules=1)


def test_symmetric_memory_of_some_ranks_is_refused():
    with pytest.raises(InvalidArgument, match="of the ranks .0, 1. alone is not simulated; check the program with 2"):
        tricomm.check(some_ranks_memory, 3, schedules=1)


def finding(program, world_size=2):
    report = tricomm.check(program, world_size, schedules=1)
    assert len(report.findings) == 1
    return report.findings[0]


def test_ranks_that_call_different_things_are_named():
    def groups():
        dist.new_group([dist.get_rank()])

    def sizes():
        dist.all_gather([torch.ones(2, device="cuda")] * 2, torch.ones(2 + dist.get_rank(), device="cuda"))

    def rows():
        dist.all_to_all_single(torch.ones(3, device="cuda"), torch.ones(2, device="cuda"), [2, 1], [1, 1])

    assert "rank 0 has new_group([0]), rank 1 has new_group([1])" in finding(groups).text
    assert "rank 0 has all_gather(float32 [2]), rank 1 has all_gather(float32 [3])" in finding(sizes).text
    assert "all_to_all_single: [1, 1] rows arrive" in finding(rows).text


@BOTH
def test_a_rank_that_dies_ends_the_waits_of_the_others(compiled):
    def program():
        pair = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            raise ValueError("of rank 0")
        dist.barrier(pair)

    with pytest.raises(ValueError, match="of rank 0"):
        tricomm.simulate(program, 2, compiled=compiled)
