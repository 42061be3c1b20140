"""The settings of a benchmark: kernels, types, libraries."""

import json
from dataclasses import asdict

import pytest

from tricomm import typed_json
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.perf.bench import request
from tricomm.perf.bench.request import Case, Settings
from tricomm.perf.units import DATA_COLLECTIVES


@pytest.mark.parametrize("world_size", [2, 8])
def test_all_is_every_shipped_kernel_of_the_collectives(world_size: int) -> None:
    chosen = request.cases(DATA_COLLECTIVES, "all", "all", world_size)
    kernels = [k for name in DATA_COLLECTIVES for k in registry.of(name, world_size)]
    shipped = {(k.collective, k.algorithm, k.protocol) for k in kernels}
    assert any(k.needs_cube for k in kernels) == (world_size == 8)
    assert {(c.collective, c.algorithm, c.protocol) for c in chosen} == shipped and len(chosen) == len(shipped)


def test_choices_that_are_not_requested_are_left_to_selection() -> None:
    assert request.cases(("all_reduce",), None, None, 2) == (Case("all_reduce", None, None),)
    assert request.cases(("all_reduce",), "two_shot", None, 2) == (Case("all_reduce", "two_shot", None),)


def test_kernels_that_quantise_are_chosen_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = request.cases(("all_reduce",), "two_shot,two_shot_fp8", "all", 2)
    assert [(case.algorithm, case.protocol) for case in chosen if case.algorithm != "two_shot"] == [
        ("two_shot_fp8", "simple"),
        ("two_shot_fp8", "ll128"),
    ]
    assert not any(registry.wire_of(case.algorithm) for case in request.cases(("all_reduce",), "all", "all", 2))
    ((name, why),) = request.left_out(("all_reduce", "all_gather"), "two_shot_int8", None, 2)
    assert name == "all_gather two_shot_int8/any" and why.startswith("all_gather has no such kernel; there is one_shot")
    monkeypatch.setenv("TRICOMM_BATCH_INVARIANT", "1")
    with pytest.raises(InvalidArgument, match="no kernel fits algorithm two_shot_int8"):
        request.cases(("all_reduce",), "two_shot_int8", None, 2)


def test_a_kernel_that_is_not_shipped_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidArgument, match="one_shot/ll, one_shot/ll128, one_shot/simple"):
        request.cases(("all_gather",), "two_shot", None, 2)
    with pytest.raises(InvalidArgument, match="there is one_shot, two_shot"):
        request.cases(("all_reduce",), "three_shot", None, 2)


def test_listed_combinations_without_a_kernel_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("text", [None, "all"])
def test_only_combinations_that_are_named_are_reported_as_left_out(text: str | None) -> None:
    assert request.left_out(DATA_COLLECTIVES, text, text, 2) == []


def test_settings_cross_as_json() -> None:
    cases = (Case("all_reduce", None, "ll", "int8"), Case("all_reduce", None, None, library="gloo"))
    settings = Settings(cases, (1, 2), op="max", modes=("eager", "graph"), check=False)
    assert settings.rows == 8
    assert typed_json.convert(json.loads(json.dumps(asdict(settings))), Settings) == settings


def test_all_types_are_those_that_have_the_operation() -> None:
    assert "bool" not in request.parse_dtypes("all", "avg", ("all_reduce",))
    assert "complex64" in request.parse_dtypes("all", "sum", ("all_gather",))
    with pytest.raises(InvalidArgument, match="op 'max' is not defined for complex64"):
        request.parse_dtypes("float32,complex64", "max", ("all_gather", "reduce"))
    with pytest.raises(InvalidArgument, match=r"dtype 'bfloat' is unknown \(did you mean bfloat16\?\)"):
        request.parse_dtypes("bfloat", "sum", ("all_reduce",))


def test_libraries_are_listed_after_the_kernels_of_each_type() -> None:
    chosen = request.cases(("all_gather",), "all", "all", 2, ("int8", "int32"), ("gloo",))
    assert [(c.library, c.dtype) for c in chosen] == [
        (library, dtype) for dtype in ("int8", "int32") for library in ("tricomm", "tricomm", "tricomm", "gloo")
    ]
