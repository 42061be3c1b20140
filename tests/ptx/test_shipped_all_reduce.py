"""Shipped all-reduces as PTX, two ranks over real arenas: bits equal to torch's."""

from __future__ import annotations

import pytest
import torch

from tests.ptx.compiled_ranks import CompiledRanks
from tricomm.kernels.collectives import registry

KERNELS = [("one_shot", "ll"), ("one_shot", "simple"), ("two_shot", "ll"), ("two_shot", "simple")]


@pytest.mark.parametrize("unit", ["warp", "block"])
@pytest.mark.parametrize("algorithm, protocol", KERNELS)
def test_all_reduce(algorithm, protocol, unit):
    """Three calls each: odd sizes, more than one tile, and one that leaves most lanes without work."""
    ranks = CompiledRanks(2)
    kernel = registry.find("all_reduce", algorithm, protocol)
    try:
        for call, count in enumerate((4099, 1, 1024)):
            generator = torch.Generator().manual_seed(call)
            xs = [torch.randn(count, generator=generator) for _ in range(2)]
            ys = [torch.full((count,), float("nan")) for _ in range(2)]
            ranks.call(kernel, xs, ys, unit=unit)
            for y in ys:
                assert torch.equal(y, xs[0] + xs[1])
    finally:
        ranks.close()


def test_a_rank_that_does_not_come_is_a_step_limit():
    from tricomm.ptx import grid
    from tricomm.ptx.unit import StepLimit

    ranks = CompiledRanks(2)
    kernel = registry.find("all_reduce", "one_shot", "simple")
    try:
        xs, ys = [torch.ones(8) for _ in range(2)], [torch.zeros(8) for _ in range(2)]
        first, _ = ranks.launches(kernel, xs, ys, steps=2000)
        with pytest.raises(StepLimit, match=r"primitives\.py:\d+"):
            grid.run([first])
    finally:
        ranks.close()
