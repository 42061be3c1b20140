"""Shipped all-reduces as PTX, two ranks over real arenas: bits equal to torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.explorer.ptx.execution.compiled_ranks import CompiledRanks
from tricomm.explorer.ptx import grid
from tricomm.explorer.ptx.divergence import Divergence, LaneGroup
from tricomm.explorer.ptx.unit import StepLimit, Unit
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


def test_in_pieces(monkeypatch):
    """As if lanes had parted at the first instruction and never met: the other half of the generated code."""

    def run(unit):
        apart = Divergence.__new__(Divergence)
        apart.unit, apart.code, apart.meetings, apart.patience = unit, unit.code, [], 64
        apart.registers = unit.code.to_arrays(unit.code.initial())
        apart.alive = np.ones(unit.shape.lanes, bool)
        apart.parts = [LaneGroup(apart.alive.copy(), 0, ())]
        assert apart.run() is None

    monkeypatch.setattr(Divergence, "_together", lambda self: None)
    monkeypatch.setattr(Unit, "_run", run)
    ranks = CompiledRanks(2)
    try:
        xs = [torch.arange(77, dtype=torch.float32) / 3 + rank for rank in range(2)]
        ys = [torch.full((77,), float("nan")) for _ in range(2)]
        ranks.call(registry.find("all_reduce", "one_shot", "ll"), xs, ys)
        assert all(torch.equal(y, xs[0] + xs[1]) for y in ys)
    finally:
        ranks.close()


def test_a_rank_that_does_not_come_is_a_step_limit():
    ranks = CompiledRanks(2)
    kernel = registry.find("all_reduce", "one_shot", "simple")
    try:
        xs, ys = [torch.ones(8) for _ in range(2)], [torch.zeros(8) for _ in range(2)]
        first, _ = ranks.launches(kernel, xs, ys, steps=2000)
        with pytest.raises(StepLimit, match=r"primitives\.py:\d+"):
            grid.run([first])
    finally:
        ranks.close()
