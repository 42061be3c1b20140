"""FlashInfer's MoE patterns (6, 7, 12): the bits of the experts' sum in torch, followed by the patterns without it."""

import re

import pytest
import torch

import tricomm
import tricomm.flashinfer as facade
from tests.core.fused import fused_reference as reference
from tests.core.fused.test_prologue import SMALL, integers, same
from tests.explorer.mutation import Edit, loaded
from tests.marks import some
from tricomm.core import launch_plan
from tricomm.errors import CollectiveMismatch, InvalidArgument

EPS = 1e-5
TOKENS, TOP_K, ROWS = 3, 9, 11
UNROLLED = 5  # of these the kernel's code has a load each


def workspace_of(comm, hidden, dtype):
    make = facade.create_allreduce_fusion_workspace
    return make("auto", comm.world_size, comm.rank, 16, hidden, dtype, group=comm)


def drawn(comm, hidden, dtype):
    """(rows, places, weight, shared) of one rank; some places are -1, one is past the last row."""
    draw = torch.Generator().manual_seed(comm.rank)
    places = torch.randint(-1, ROWS, (TOKENS, TOP_K), generator=draw).int()
    places[0, 1], places[1, 0] = -1, ROWS
    rows, shared = (integers(comm.rank + n, count, hidden, dtype=dtype) for n, count in ((10, ROWS), (20, TOKENS)))
    weight = torch.randn((TOKENS, TOP_K), generator=draw)
    return rows, places, weight, shared


def summed(rows, places, weight, shared):
    total = torch.zeros(len(places), rows.shape[1])
    for t, k in ((t, k) for t in range(len(places)) for k in range(places.shape[1])):
        if 0 <= places[t, k] < len(rows):
            total[t] += rows[places[t, k]].float() * (1 if weight is None else weight[t, k].float())
    return (total + (0 if shared is None else shared.float())).to(rows.dtype)


def moe(comm, workspace, number, given, residual, weight, **more):
    rows, places, scale, shared = given
    return facade.allreduce_fusion(
        rows,
        workspace,
        number,
        residual_in=residual,
        rms_gamma=weight,
        rms_eps=EPS,
        expanded_idx_to_permuted_idx=places,
        expert_scale_factor=scale,
        shared_expert_output=shared,
        **more,
    )


@pytest.mark.parametrize("without", [(), (2,), (3,)], ids=["all", "no weight", "no shared"])
@pytest.mark.parametrize(
    ("dtype", "hidden", "world_size", "options"),
    some(
        [
            (torch.bfloat16, 264, 3, None),
            (torch.float16, 48, 2, SMALL),
            (torch.float32, 20, 2, None),  # no fused kernel takes such rows
            (torch.float32, 200, 2, SMALL),
        ],
        lambda n, value: n in (0, 2),
    ),
)
def test_finalize_has_the_bits_of_the_sum_and_then_the_pattern(dtype, hidden, world_size, options, without):
    def body(comm):
        workspace = workspace_of(comm, hidden, dtype)
        rows, places, scale, shared = drawn(comm, hidden, dtype)
        if without:
            places, scale = places[:, :UNROLLED].contiguous(), scale[:, :UNROLLED].contiguous()
        given = [None if n in without else t for n, t in enumerate((rows, places, scale, shared))]
        x = summed(*given)
        _, residual, weight = reference.inputs(comm.rank, TOKENS, hidden, dtype)
        common = {"residual_in": residual, "rms_gamma": weight, "rms_eps": EPS}
        for number, alone, more in ((7, 1, {}), (12, 2, {"scale_factor": 0.5}))[: 1 if 2 in without else 2]:
            for use_oneshot in (None, False):
                news = torch.full_like(x, 77), torch.full_like(x, 77)
                result = moe(comm, workspace, number, given, residual, weight, residual_out=news[0], **more)
                other = facade.allreduce_fusion(
                    x, workspace, alone, residual_out=news[1], use_oneshot=use_oneshot, **common, **more
                )
                assert same(result, other) and same(*news)
        kept = residual.clone()
        into = torch.full_like(x, 77)
        assert moe(comm, workspace, 7, given, kept, weight, residual_out=kept, norm_out=into) is into
        assert same(kept, news[0])
        return into

    results = tricomm.simulate(body, world_size, **({} if options is None else {"options": options}))
    assert all(same(other, results[0]) for other in results)


def test_reduction_is_expert_by_expert():
    def body(comm):
        workspace, (experts, hidden) = workspace_of(comm, 48, torch.bfloat16), (4, 48)
        rows, _, _, tokens = drawn(comm, hidden, torch.bfloat16)
        rows = integers(comm.rank, experts * TOKENS, hidden, dtype=torch.bfloat16)
        scales = integers(comm.rank + 5, experts, TOKENS) / 2
        places = torch.arange(experts * TOKENS).view(experts, TOKENS).t().int()
        x = summed(rows, places, scales.t(), tokens)
        _, residual, weight = reference.inputs(comm.rank, TOKENS, hidden, torch.bfloat16)
        common = {"residual_in": residual, "rms_gamma": weight, "rms_eps": EPS}
        given = {
            "moe_reduction_device_num_experts": experts,
            "moe_reduction_scale_input": scales,
            "moe_reduction_active_experts_token_input": rows.view(experts, TOKENS, hidden),
            "moe_reduction_token_input": tokens,
        }
        result = facade.allreduce_fusion(None, workspace, 6, **given, **common)
        assert same(result, facade.allreduce_fusion(x, workspace, 1, **common))
        codes, other = (torch.full((TOKENS, hidden // 2), 77, dtype=torch.uint8) for _ in range(2))
        more = {"scale_factor": 3.0, "layout_code": 2}
        assert facade.allreduce_fusion(None, workspace, 6, quant_out=codes, **more, **given, **common) is codes
        facade.allreduce_fusion(x, workspace, 3, quant_out=other, **more, **common)
        assert same(codes, other)
        for change in ({"moe_reduction_device_num_experts": 3}, {"moe_reduction_scale_input": None}):
            with pytest.raises(InvalidArgument, match=next(iter(change))):
                facade.allreduce_fusion(None, workspace, 6, **given | change, **common)
        with pytest.raises(InvalidArgument, match="writes no output"):
            facade.allreduce_fusion(None, workspace, 6, output=x, **given, **common)
        return True

    assert tricomm.simulate(body, 2) == [True, True]


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    def body(comm):
        workspace = workspace_of(comm, 48, torch.bfloat16)
        given = drawn(comm, 48, torch.bfloat16)
        rows, places, scale, shared = given
        _, residual, weight = reference.inputs(comm.rank, TOKENS, 48, torch.bfloat16)
        both, spare = torch.zeros(TOKENS + 1, 48).bfloat16(), torch.zeros(TOKENS, 48).bfloat16()
        both[1], weight = weight, both[1]
        for change, more, why in (
            ((None, places, scale, shared), {}, "needs input"),
            ((rows, None, scale, shared), {}, "needs expanded_idx_to_permuted_idx"),
            ((rows, places[0], scale, shared), {}, "needs expanded_idx_to_permuted_idx"),
            ((rows, places.long(), scale, shared), {}, "expert places: torch.int64"),
            ((rows, places[:2], scale, shared), {}, "expert places: torch.int32 of shape (2, 9)"),
            ((rows.half(), places, scale, shared), {}, "expert rows: torch.float16"),
            ((rows[:, :40].contiguous(), places, scale, shared), {}, "expert rows: torch.bfloat16 of shape (11, 40)"),
            ((rows, places, scale[:, :2], shared), {}, "expert weight: torch.float32 of shape (3, 2)"),
            ((rows, places, scale.double(), shared), {}, "expert weight: torch.float64"),
            ((rows, places, scale, shared[:1]), {}, "shared: torch.bfloat16 of shape (1, 48)"),
            (given, {"quant_out": rows}, "writes no quant_out"),
            (given, {"scale_out": scale}, "writes no scale_out"),
            (given, {"norm_out": shared}, "norm_out overlaps shared"),
            (given, {"residual_out": rows[2:5]}, "residual_out overlaps expert rows"),
            (given, {"norm_out": both[1:]}, "norm_out overlaps weight"),
            ((rows, places, spare[0, :27].view(3, 9), shared), {"norm_out": spare}, "norm_out overlaps expert weight"),
        ):
            with pytest.raises(InvalidArgument, match=re.escape(why)):
                moe(comm, workspace, 7, change, residual, weight, **more)
        for change, more, why in (
            (given, {}, "needs a scale_factor"),
            (given, {"scale_factor": 1.0, "norm_out": spare}, "RMSNormFP8Quant writes no norm_out"),
            (given, {"scale_factor": 1.0, "scale_out": scale}, "writes no scale_out"),
            ((rows, places, None, shared), {"scale_factor": 1.0}, "needs an expert_scale_factor"),
        ):
            with pytest.raises(InvalidArgument, match=why):
                moe(comm, workspace, 12, change, residual, weight, **more)
        with pytest.raises(InvalidArgument, match="needs residual_in"):
            moe(comm, workspace, 7, given, None, weight)
        with pytest.raises(InvalidArgument, match="residual_in has to be a tensor of"):
            moe(comm, workspace, 7, given, residual[0], weight)
        return comm.all_reduce(torch.ones(3)).sum()

    assert tricomm.simulate(body, 2) == [6.0, 6.0]


def test_a_rank_without_experts_is_told():
    def body(comm):
        workspace = workspace_of(comm, 48, torch.bfloat16)
        x, residual, weight = reference.inputs(comm.rank, TOKENS, 48, torch.bfloat16)
        with pytest.raises(CollectiveMismatch, match="experts"):
            if comm.rank:
                comm.all_reduce_rms_norm(x, residual, weight, EPS)
            else:
                moe(comm, workspace, 7, drawn(comm, 48, torch.bfloat16), residual, weight)

    tricomm.simulate(body, 2)


def called(comm):
    given = drawn(comm, 48, torch.bfloat16)
    _, residual, weight = reference.inputs(comm.rank, TOKENS, 48, torch.bfloat16)
    workspace, out = workspace_of(comm, 48, torch.bfloat16), torch.zeros(TOKENS, 48).bfloat16()
    moe(comm, workspace, 7, given, residual, weight, residual_out=out)
    total = comm.all_reduce(summed(*given))
    if not same(out, (total.float() + residual.float()).bfloat16()):
        raise AssertionError("wrong sums")
    return out


DEVICE = "kernels/device/expert_rows.py"
MUTANTS = {
    "a row past the last one is read": ("(place >= 0) & (place < count)", "(place >= 0)"),
    "a row before the first one is read": ("(place >= 0) & (place < count)", "(place < count)"),
    "more rows than there are for a token": ("there = (first + k) < top_k", "there = (first + k) < top_k + 3"),
}


@pytest.mark.parametrize("name", some(MUTANTS, 3))
def test_the_explorer_notices_each_mistake(name):
    old, new = MUTANTS[name]
    with loaded((Edit(DEVICE, old, new),)):
        changed = __import__(launch_plan.registry.__name__.split(".")[0] + ".device.expert_rows", fromlist=["a"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch_plan, "expert_rows", changed.expert_rows)
            assert not tricomm.check(called, 2, schedules=2, options=SMALL).ok


@pytest.mark.exhaustive
def test_compiled_kernels_have_no_finding_and_the_same_bits():
    plain, compiled = (tricomm.simulate(called, 2, compiled=how) for how in (None, "sm_90"))
    assert all(map(same, plain, compiled))
    assert tricomm.check(called, 2, schedules=2, compiled="sm_90").ok
