"""The soak of the compiled kernels: every one, for every architecture, under 200 schedules; and what its cases show."""

from __future__ import annotations

import pytest

from tests.explorer.compiled import at_length
from tests.explorer.compiled.at_length import Record
from tests.marks import compiles


@pytest.mark.parametrize("name", ["reduce_one_shot_ll"])
def test_lanes_that_hold_several_words_of_a_tile_are_ordered(name):
    """One warp has no barrier in its reductions; it loads its own words and stores the sum in their place."""
    kernel = next(k for k in at_length.KERNELS if k.name == name)
    report = at_length.cases(kernel)[0].check("sm_90", 1, "random")
    assert report.ok, report


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["sm_90", "sm_80", "sm_100"])
@pytest.mark.parametrize("kernel", at_length.KERNELS, ids=lambda kernel: kernel.name)
def test_a_shipped_kernel_is_passed_at_length(kernel, architecture, request):
    """`make soak` runs this under every Triton; they have the record in common."""
    if not compiles(kernel, int(architecture.removeprefix("sm_"))):
        pytest.skip("refused by name")
    record = Record(request.config.cache.mkdir("explored") / "passed.jsonl")
    for case in at_length.cases(kernel):
        at_length.passes(case, architecture, record)
