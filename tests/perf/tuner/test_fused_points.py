"""Rows of an all_reduce_rms_norm in the tuner: its points and shapes, right and wrong results, and the row that it
writes decides for the calls that it is for."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import tricomm
from tests.marks import compiles
from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.perf.row_calls import parse_forms
from tricomm.perf.tuner import coordinator, points
from tricomm.perf.tuner.points import Candidate, Point
from tricomm.perf.tuner.worker import Sampler
from tricomm.policy import row_shapes
from tricomm.policy.selection_facts import SelectionFacts

_POINT = Point(FUSED, 16, "eager", 3 * 64 * 2, epilogue="fp8@64")
_H100 = SelectionFacts("sm_90", 8, layout.plan(8, 64 << 20), layout.MAX_BLOCKS)


def test_points_are_whole_rows_as_long_as_calls_are_fused() -> None:
    request = points.parse(FUSED, "all", "1K,40K,64M", "graph", "9s", forms=parse_forms("8192, 64", "none,fp8"))
    results = [(p.epilogue, p.bits, p.nbytes) for p in request.points(cpu=False)]
    assert results[:2] == [("norm@8192", 16, 16384), ("norm@8192", 16, 32768)] and results[2][1:] == (32, 32768)
    assert ("fp8@64", 32, 1024) in results and max(nbytes for _, _, nbytes in results) < 64 << 20
    assert FUSED not in points.parse("all", "16", "1K", "graph", "9s", forms=()).collectives


def test_every_candidate_is_launched_as_it_is_named() -> None:
    point = Point(FUSED, 16, "graph", 4 * 8192 * 2, epilogue="norm@8192")
    kernels = [k for k in registry.of(FUSED, 8) if compiles(k)]
    shapes = points.pool(kernels, _H100.layout, layout.MAX_BLOCKS, cpu=False)
    usable = [c for c in shapes if coordinator._as_it_is(_H100, point, c)]
    assert len(usable) > 10 * len(kernels)
    assert {c.family for c in usable} == {(k.algorithm, k.protocol) for k in kernels}
    assert max(c.blocks for c in usable) == 4  # rows
    for candidate in usable[::17]:
        facts = replace(_H100, tuned=(candidate.row(point, 8, None),), tuned_name="tuned")
        choose = [FUSED, 16, 8192, 4, (None, None), ""]
        choice = row_shapes.choose(facts, *choose, "graph")  # type: ignore[arg-type]
        assert isinstance(choice, tricomm.Choice) and "table 'tuned' row 0" in choice.reason
        assert (choice.blocks, choice.warps, choice.block) == (candidate.blocks, candidate.warps, candidate.tile)
        for other in ([*choose, "eager"], [*choose[:5], "fp8", "graph"], [FUSED, 32, *choose[2:], "graph"]):
            assert "table" not in row_shapes.choose(facts, *other).reason  # type: ignore[arg-type, union-attr]


def test_a_row_that_no_kernel_supports_is_left_to_the_rules() -> None:
    row = Candidate("two_shot", "ll", 4, 8, 32).row(replace(_POINT, epilogue="nvfp4@96"), 8, None)
    choice = row_shapes.choose(replace(_H100, tuned=(row,)), FUSED, 16, 96, 4, (None, None), "nvfp4")
    rule = row_shapes.choose(_H100, FUSED, 16, 96, 4, (None, None), "nvfp4")
    assert isinstance(choice, tricomm.Choice) and isinstance(rule, tricomm.Choice) and choice.warps >= 1
    assert choice.algorithm in (rule.algorithm, "two_shot")


@pytest.mark.parametrize("family", [("one_shot", "ll"), ("two_shot", "ll128")])
def test_results_are_checked_by_the_kernel_that_is_named(family: tuple[str, str]) -> None:
    candidate = Candidate(*family, 1, 8, 32)

    def body(comm: Any) -> tuple[int, int, str]:
        sampler = Sampler(comm)
        right = sampler.check(_POINT, candidate)
        asked: dict[str, Any] = {"hidden": 64, "quantize": "fp8"}
        choice = comm.explain(FUSED, _POINT.nbytes, torch.bfloat16, **asked)
        assert choice == comm.explain(FUSED, _POINT.nbytes, torch.bfloat16, **asked, top_k=8)
        call: Any = sampler._call
        call.run = lambda: None
        return right, sampler.check(_POINT, candidate), f"{choice.algorithm}/{choice.protocol}"

    for right, wrong, name in tricomm.simulate(body, 2):
        assert right == 0 and wrong > 100 and name == "/".join(family)
