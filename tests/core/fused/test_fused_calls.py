"""all_reduce + residual + RMSNorm of c10d groups: both CPU routes, groups of other backends, torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tricomm
import tricomm.flashinfer as facade
from tests import ranks
from tests.c10d.bodies.groups import ROUTES, default_group, refused
from tests.core.fused import fused_reference as reference
from tricomm.errors import CollectiveMismatch

EPS = 1e-5


def _compiled(world, x, residual, weight, expected):
    """The operation stays in the graph, with any number of rows."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    name = world.group_name

    def layer(x, residual):
        norm, residual = torch.ops.tricomm.all_reduce_rms_norm(x * 2, residual, weight, EPS, 1.0, name)
        return norm, residual + 0

    for kind in (backend, "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=kind)
        result = compiled(x / 2, residual)
        if not all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)):
            return [f"compiled by {kind}"]
        compiled(torch.cat([x, x]), torch.cat([residual, residual]))
    held = [node for node in graphs[0].graph.nodes if node.target == torch.ops.tricomm.all_reduce_rms_norm]
    return [] if len(held) == 1 else ["not in the graph"]


def _summands(rank):
    """Rows, places, weights and shared rows of three tokens, two experts each."""
    draw = torch.Generator().manual_seed(rank)
    rows, shared = (torch.randint(-4, 5, (count, 32), generator=draw).bfloat16() for count in (7, 3))
    places = torch.tensor([[0, 6], [2, -1], [5, 3]]).int()
    return rows, places, torch.randint(-2, 3, (3, 2), generator=draw).float(), shared


def _of_experts(world, rank, world_size, scale):
    """Each form over experts' rows against the same form over their sums, misses named; also compiled."""
    o, name, wrong = torch.ops.tricomm, world.group_name, []
    _, residual, weight = reference.inputs(rank, 3, 32, torch.bfloat16)
    rows, places, factors, shared = _summands(rank)
    there = (places >= 0)[..., None]
    x = torch.where(there, rows[places.long()].float() * factors[..., None], 0).sum(1) + shared.float()
    common = (residual, weight, EPS, 1.0)
    forms = {"": (), "_fp8": (scale,), "_fp8_per_token": (), "_nvfp4": (scale, "swizzled_128x4")}
    for suffix, more in forms.items():
        exact = getattr(o, f"all_reduce_rms_norm{suffix}")(x.bfloat16(), *common, *more, name)
        op = getattr(o, f"all_reduce_rms_norm{suffix}_of_experts")
        given = (rows.t().contiguous().t(), places, factors, shared, *common, *more, name)
        for call in (op, *([torch.compile(op, fullgraph=True, backend="aot_eager")] if not suffix else [])):
            same = all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(call(*given), exact, strict=True)
            )
            wrong += [] if same else [f"of experts {suffix}"]
    refused(lambda: o.all_reduce_rms_norm_of_experts(rows, places[0], None, None, *common, name), "expert places")
    refused(lambda: o.all_reduce_rms_norm_of_experts(rows, places[0, 0], None, None, *common, name), "expert places")
    return wrong


def ops(rank, world_size, tell, url, route, backend, checked):
    """Every operation on a group of `backend`: numbers, opcheck, what torch.compile makes of it, refusals."""
    wrong = []
    with default_group(rank, world_size, url, route, backend) as world:
        o, name = torch.ops.tricomm, world.group_name
        x, residual, weight = reference.inputs(rank, 3, 32, torch.bfloat16)
        total = reference.summed(world_size, 3, 32, torch.bfloat16)
        exact = reference.norm_of(total, weight, EPS, 1.0)
        scale = torch.tensor([0.25])
        common = (x, residual, weight, EPS, 1.0)
        norm, new = o.all_reduce_rms_norm(*common, name)
        wrong += [] if torch.equal(new.double(), total) and reference.within_an_ulp(norm, exact) else ["norm"]
        codes, again = o.all_reduce_rms_norm_fp8(*common, scale, name)
        wrong += [] if reference.rounded(codes.double(), norm.double() / 0.25, reference.E4M3) else ["fp8"]
        codes, scales, once_more = o.all_reduce_rms_norm_fp8_per_token(*common, name)
        exact = norm.double() / scales.double()
        wrong += [] if reference.rounded(codes.double(), exact, reference.E4M3) else ["fp8_per_token"]
        codes, scales, last = o.all_reduce_rms_norm_nvfp4(*common, scale, "linear", name)
        values, result = reference.nvfp4(codes, scales, "linear")
        exact = norm.double().view(3, 2, 16) * 0.25 / result[..., None]
        wrong += [] if reference.rounded(values.view(3, 2, 16), exact, reference.E2M1) else ["nvfp4"]
        wrong += [] if all(torch.equal(new, other) for other in (again, once_more, last)) else ["residuals"]
        forms = [
            (o.all_reduce_rms_norm_nvfp4, (scale, "swizzled_128x4")),
            (o.all_reduce_rms_norm, ()),
            (o.all_reduce_rms_norm_fp8, (scale,)),
            (o.all_reduce_rms_norm_fp8_per_token, ()),
        ]
        for op, more in forms[:checked]:
            torch.library.opcheck(op, (*common, *more, name))
        wrong += _of_experts(world, rank, world_size, scale)
        for op, more in forms[:checked]:
            name_of = op._qualified_op_name.removeprefix("tricomm::")
            torch.library.opcheck(
                getattr(o, f"{name_of}_of_experts"), (*_summands(rank), residual, weight, EPS, 1.0, *more, name)
            )
        wrong += _compiled(world, x, residual, weight, (norm, new))
        refused(lambda: o.all_reduce_rms_norm(x, residual, weight[:8], EPS, 0.0, name), "weight", "(8,)")
        refused(lambda: o.all_reduce_rms_norm(x, residual, weight, -1.0, 0.0, name), "eps=-1.0")
    return wrong


@pytest.mark.parametrize(
    ("world_size", "route", "backend", "checked"),
    [
        (1, "gloo", "tricomm", 1),
        pytest.param(2, "kernels", "tricomm", 4, marks=pytest.mark.exhaustive),
        pytest.param(2, "gloo", "gloo", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_operations(world_size, route, backend, checked, url):
    assert ranks.run(world_size, ops, url, route, backend, checked, timeout=200) == [[]] * world_size


def wrapped(rank, world_size, tell, url, route):
    """A wrapped group, ranks with different arguments, and the group after a refusal."""
    with default_group(rank, world_size, url, route, "gloo") as world:
        group = tricomm.wrap(world)
        x, residual, weight = reference.inputs(rank, 3, 32, torch.float16)
        o, name = torch.ops.tricomm, group.group_name
        before = tricomm.stats()
        norm, new = o.all_reduce_rms_norm(x, residual, weight, EPS, 0.0, name)
        after = tricomm.stats()
        total = reference.summed(world_size, 3, 32, torch.float16)
        right = torch.equal(new.double(), total)
        right &= reference.within_an_ulp(norm, reference.norm_of(total, weight, EPS))
        right &= not _of_experts(group, rank, world_size, torch.tensor([0.25]))
        counted = {r: sum(after[r].values()) - sum(before[r].values()) for r in ("kernels", "gloo")}
        eps = EPS if rank else 2 * EPS
        try:
            o.all_reduce_rms_norm(x, residual, weight, eps, 0.0, name)
            text = "nothing"
        except CollectiveMismatch as error:
            text = str(error)
        dist.destroy_process_group(group)
    return right, counted, text


@pytest.mark.parametrize("route", ROUTES)
def test_a_wrapped_group_and_ranks_with_different_arguments(route, url):
    for right, counted, text in ranks.run(2, wrapped, url, route, timeout=100):
        assert right and counted == {"kernels": int(route == "kernels"), "gloo": int(route == "gloo")}
        if route == "kernels":
            assert "eps 1e-05" in text and "eps 2e-05" in text


@ranks.each(2, True, timeout=100)
def test_workspaces_of_process_groups(rank, world_size, tell, url):
    """Workspaces over the default group and over a part of it, destroyed independently."""
    with default_group(rank, world_size, url, backend="gloo") as world:
        pair = dist.new_group([0, 1])
        results = []
        for group in (None, pair):
            workspace = facade.create_allreduce_fusion_workspace(
                "trtllm", world_size, rank, 4, 32, torch.bfloat16, comm_backend=object(), group=group
            )
            x, residual, weight = reference.inputs(rank, 4, 32, torch.bfloat16)
            facade.allreduce_fusion(
                x, workspace, 1, norm_out=x, residual_in=residual, residual_out=residual, rms_gamma=weight, rms_eps=EPS
            )
            total = reference.summed(world_size, 4, 32, torch.bfloat16)
            results.append(torch.equal(residual.double(), total))
            results.append(reference.within_an_ulp(x, reference.norm_of(total, weight, EPS)))
            workspace.destroy()
            workspace.destroy()
        refused(lambda: facade.create_allreduce_fusion_workspace("auto", 3, rank, 4, 32, torch.half), "world_size=3")
        dist.barrier(world)
    refused(lambda: facade.create_allreduce_fusion_workspace("auto", 2, rank, 4, 32, torch.half), "init_process_group")
    return all(results)
