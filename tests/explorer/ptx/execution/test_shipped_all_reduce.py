"""Shipped all-reduces as PTX, two ranks: torch's bits, executed by warps, by blocks, and with all lanes diverged."""

from functools import partial

import numpy as np
import pytest
import torch

from tricomm import check, simulate
from tricomm.explorer.ptx.units.divergence import Divergence, LaneGroup
from tricomm.explorer.ptx.units.unit import Unit

KERNELS = [("one_shot", "ll"), ("one_shot", "simple"), ("two_shot", "ll"), ("two_shot", "simple")]


def sums(algorithm, protocol, counts, comm):
    for call, count in enumerate(counts):
        xs = [torch.randn(count, generator=torch.Generator().manual_seed(2 * call + rank)) for rank in range(2)]
        y = comm.all_reduce(xs[comm.rank].clone(), algorithm=algorithm, protocol=protocol)
        assert torch.equal(y, xs[0] + xs[1])
    return True


@pytest.mark.parametrize("algorithm, protocol", KERNELS)
def test_all_reduce(algorithm, protocol):
    """Three calls each: odd sizes, more than one tile, and one that leaves most lanes without work."""
    body = partial(sums, algorithm, protocol, (4099, 1, 1024))
    assert simulate(body, 2, compiled="sm_90") == [True, True]  # by blocks
    assert check(partial(sums, algorithm, protocol, (77,)), 2, 1, compiled="sm_90").ok  # by warps


def test_in_pieces(monkeypatch):
    """As if lanes diverged at the first instruction for good, which runs the other half of the generated code."""
    ran = []

    def run(unit):
        apart = Divergence.__new__(Divergence)
        apart.unit, apart.code, apart.meetings, apart.patience = unit, unit.code, [], 64
        apart.registers = unit.code.to_arrays(unit.code.initial())
        apart.alive = np.ones(unit.shape.lanes, bool)
        apart.parts = [LaneGroup(apart.alive.copy(), 0, ())]
        assert apart.run() is None
        ran.append(unit)

    monkeypatch.setattr(Divergence, "_together", lambda self: None)
    monkeypatch.setattr(Unit, "_run", run)
    assert simulate(partial(sums, "one_shot", "ll", (77,)), 2, compiled="sm_90") == [True, True]
    assert len(ran) >= 2
