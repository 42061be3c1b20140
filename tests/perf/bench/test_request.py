"""The settings of a benchmark: kernels, types, libraries."""

from __future__ import annotations

import pytest

from tricomm.errors import InvalidArgument
from tricomm.perf.bench import request


def test_a_kernel_that_is_not_shipped_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidArgument, match="one_shot/ll, one_shot/ll128, one_shot/simple"):
        request.cases(("all_gather",), "two_shot", None, 2)
    with pytest.raises(InvalidArgument, match="there is one_shot, two_shot"):
        request.cases(("all_reduce",), "three_shot", None, 2)


def test_what_the_lists_name_and_no_kernel_is_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    known = "all_reduce has no such kernel; there is one_shot/ll, one_shot/ll128, one_shot/simple, two_shot/ll, "
    known += "two_shot/ll128, two_shot/simple, multicast/simple"
    assert request.left_out(("all_reduce",), "multicast, one_shot", "ll128,ll", 2) == [
        ("all_reduce multicast/ll128", known),
        ("all_reduce multicast/ll", known),
    ]
    few = "one_shot/ll, one_shot/ll128, one_shot/simple"
    assert request.left_out(("all_reduce", "gather"), "one_shot,two_shot", None, 2) == [
        ("gather two_shot/any", f"gather has no such kernel; there is {few}")
    ]
    rows = "all_reduce_rms_norm has no such kernel; there is one_shot/ll, one_shot/ll128, two_shot/ll, two_shot/ll128"
    asked = ("all_reduce", "all_reduce_rms_norm")
    assert request.left_out(asked, "all", "simple,ll", 2) == [("all_reduce_rms_norm any/simple", rows)]
    cube = [("all_reduce hybrid_cube_mesh/ll", "a hybrid cube mesh has 8 ranks, not 4")]
    assert request.left_out(("all_reduce",), "one_shot,hybrid_cube_mesh", "ll", 4) == cube
    assert request.left_out(("all_reduce",), "one_shot,hybrid_cube_mesh", "ll", 8) == []
    monkeypatch.setenv("TRICOMM_BATCH_INVARIANT", "1")
    (result,) = request.left_out(("all_reduce",), "one_shot,multicast", "simple", 2)
    assert result[0] == "all_reduce multicast/simple" and "TRICOMM_BATCH_INVARIANT" in result[1]


def test_all_types_are_those_that_have_the_operation() -> None:
    assert "bool" not in request.parse_dtypes("all", "avg", ("all_reduce",))
    assert "complex64" in request.parse_dtypes("all", "sum", ("all_gather",))
    with pytest.raises(InvalidArgument, match="op 'max' is not defined for complex64"):
        request.parse_dtypes("float32,complex64", "max", ("all_gather", "reduce"))
    with pytest.raises(InvalidArgument, match=r"dtype 'bfloat' is unknown \(did you mean bfloat16\?\)"):
        request.parse_dtypes("bfloat", "sum", ("all_reduce",))
