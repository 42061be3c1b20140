"""The check's data are exact in every type, differ where they must, and the comparison misses nothing."""

from __future__ import annotations

import pytest
import torch

from tricomm.kernels.registry import DTYPES, OPS
from tricomm.perf import bench_data


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", DTYPES)
def test_inputs_and_results_are_exact(name: str, op: str, world_size: int) -> None:
    dtype = getattr(torch, name)
    exact = bench_data.expected("all_reduce", op, world_size, 5, 4096)
    parts = [bench_data.values("all_reduce", op, world_size, r, 5, 4096) for r in range(world_size)]
    for whole in (exact, *parts):
        assert torch.equal(whole.to(dtype).to(torch.int64), whole)
    if op == "avg":
        assert torch.equal(exact * world_size, torch.stack(parts).sum(0))


def test_ranks_calls_and_elements_differ() -> None:
    facts = ("all_reduce", "sum", 4)
    a = bench_data.values(*facts, 0, 7, 4096)
    rank, call = bench_data.values(*facts, 1, 7, 4096), bench_data.values(*facts, 0, 8, 4096)
    for other in (rank, call, a.roll(1), a.roll(2048)):
        assert (a != other).float().mean() > 0.9


@pytest.mark.parametrize("name", DTYPES)
def test_poison_is_no_result_and_is_counted(name: str) -> None:
    out = torch.zeros(64, dtype=getattr(torch, name))
    bench_data.poison(out)
    exact = bench_data.expected("all_reduce", "sum", 4, 1, 64)
    assert bench_data.wrong(out, exact) == 64
    out.copy_(exact)
    assert bench_data.wrong(out, exact) == 0
    out[3] += 1
    assert bench_data.wrong(out, exact) == 1


def test_a_gathered_result_is_in_rank_order() -> None:
    exact = bench_data.expected("all_gather", "sum", 3, 1, 8)
    assert torch.equal(exact[8:16], bench_data.values("all_gather", "sum", 3, 1, 1, 8))
