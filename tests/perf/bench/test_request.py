"""What a benchmark is asked to do: sizes, names, kernels, and nccl-tests' formulas."""

from __future__ import annotations

import pytest

from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.perf.bench import request
from tricomm.perf.bench.request import Case, Settings


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1K:1M:4", (1024, 4096, 16384, 65536, 262144, 1048576)),
        ("1K:5K:4", (1024, 4096)),
        ("8:32", (8, 16, 32)),
        ("1k,64KB,1MiB,1K", (1024, 65536, 1048576)),
        ("7", (7,)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert request.parse_sizes(text) == sizes


_BAD = ["", "x", "0", "-4", "1K:", "4K:1K:2", "1:9:1", "1:9:0", "1:2:3:4", "17G", "1T", "1.5K"]


@pytest.mark.parametrize("text", _BAD)
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="size"):
        request.parse_sizes(text)


@pytest.mark.parametrize("world_size", [2, 8])
def test_all_is_every_shipped_kernel_of_the_collectives(world_size: int) -> None:
    found = request.cases(request.COLLECTIVES, "all", "all", world_size)
    kernels = [k for name in request.COLLECTIVES for k in registry.of(name, world_size)]
    shipped = {(k.collective, k.algorithm, k.protocol) for k in kernels}
    assert any(k.needs_cube for k in kernels) == (world_size == 8)
    assert {(c.collective, c.algorithm, c.protocol) for c in found} == shipped and len(found) == len(shipped)


def test_what_is_not_asked_for_is_left_to_selection() -> None:
    assert request.cases(("all_reduce",), None, None, 2) == (Case("all_reduce", None, None),)
    assert request.cases(("all_reduce",), "two_shot", None, 2) == (Case("all_reduce", "two_shot", None),)


def test_a_kernel_that_is_not_shipped_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidArgument, match="one_shot/ll, one_shot/simple"):
        request.cases(("all_gather",), "two_shot", None, 2)
    with pytest.raises(InvalidArgument, match="there is one_shot, two_shot"):
        request.cases(("all_reduce",), "three_shot", None, 2)


def test_counts_and_sizes_are_those_of_nccl_tests() -> None:
    assert request.count("all_reduce", 1000, 4, 4) == 250
    assert request.count("all_gather", 1000, 4, 4) == 60  # 250 bytes a rank, down to a multiple of 16
    assert request.total_bytes("all_gather", 60, 4, 4) == 960
    assert request.count("all_to_all", 1000, 4, 4) == 60 and request.total_bytes("reduce_scatter", 60, 4, 4) == 960
    assert request.count("broadcast", 1000, 4, 4) == 250 and request.total_bytes("reduce", 250, 4, 4) == 1000
    assert request.count("all_gather", 1, 2, 8) == 8 and request.count("all_reduce", 1, 8, 2) == 1


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert request.algorithm_bandwidth(10**9, 1e6) == pytest.approx(1.0)  # 1e9 B in one second
    assert request.bus_factor("all_reduce", 8) == pytest.approx(1.75)
    assert request.bus_factor("all_gather", 8) == pytest.approx(0.875)
    assert request.bus_factor("all_to_all", 8) == pytest.approx(0.875)
    assert request.bus_factor("broadcast", 8) == request.bus_factor("reduce", 8) == 1.0
    assert request.bus_factor("all_reduce", 1) == 0.0


def test_settings_cross_as_json() -> None:
    cases = (Case("all_reduce", None, "ll", "int8"), Case("all_reduce", None, None, library="gloo"))
    settings = Settings(cases, (1, 2), op="max", modes=("eager", "graph"), check=False)
    assert settings.rows == 8
    assert Settings.from_json(settings.to_json()) == settings


def test_all_types_are_those_that_have_the_operation() -> None:
    assert "bool" not in request.parse_dtypes("all", "avg", ("all_reduce",))
    assert "complex64" in request.parse_dtypes("all", "max", ("all_gather",))
    with pytest.raises(InvalidArgument, match="op 'max' is not defined for complex64"):
        request.parse_dtypes("float32,complex64", "max", ("all_gather", "reduce"))
    with pytest.raises(InvalidArgument, match=r"dtype 'bfloat' is unknown \(did you mean bfloat16\?\)"):
        request.parse_dtypes("bfloat", "sum", ("all_reduce",))


def test_libraries_come_behind_the_kernels_of_each_type() -> None:
    found = request.cases(("all_gather",), "all", "all", 2, ("int8", "int32"), ("gloo",))
    assert [(c.library, c.dtype) for c in found] == [
        (library, dtype) for dtype in ("int8", "int32") for library in ("tricomm", "tricomm", "gloo")
    ]
