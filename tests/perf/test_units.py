"""nccl-tests' formulas."""

import pytest

from tricomm.perf import units


def test_counts_and_sizes_are_those_of_nccl_tests() -> None:
    assert units.row_elements("all_reduce", 1000, 4, 4) == 250
    assert units.row_elements("all_gather", 1000, 4, 4) == 60  # 250 bytes a rank, down to a multiple of 16
    assert units.total_bytes("all_gather", 60, 4, 4) == 960
    assert units.row_elements("all_to_all", 1000, 4, 4) == 60 and units.total_bytes("reduce_scatter", 60, 4, 4) == 960
    assert units.row_elements("broadcast", 1000, 4, 4) == 250 and units.total_bytes("reduce", 250, 4, 4) == 1000
    assert units.row_elements("all_gather", 1, 2, 8) == 8 and units.row_elements("all_reduce", 1, 8, 2) == 1


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert units.algorithm_bandwidth(10**9, 1e6) == pytest.approx(1.0)  # 1e9 B in one second
    assert units.bus_factor("all_reduce", 8) == pytest.approx(1.75)
    assert units.bus_factor("all_gather", 8) == pytest.approx(0.875)
    assert units.bus_factor("all_to_all", 8) == pytest.approx(0.875)
    assert units.bus_factor("broadcast", 8) == units.bus_factor("reduce", 8) == 1.0
    assert units.bus_factor("all_reduce", 1) == 0.0
