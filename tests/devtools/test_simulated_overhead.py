"""The shares of a simulated call are shares, of the right parts, and are marked."""

from __future__ import annotations

import pytest

from devtools import simulated_overhead
from tricomm.kernels.collectives import registry


@pytest.mark.usefixtures("forked_workers")
def test_shares_of_every_kernel() -> None:
    rows = simulated_overhead.measure(world_size=2, nbytes=16384, calls=2)
    assert {r["kernel"] for r in rows} == {
        k.name for name in simulated_overhead.COLLECTIVES for k in registry.of(name, 2)
    }
    for row in rows:
        assert row["simulated"] is True and row["wall_us"] > 0
        assert sum(row[part] for part in simulated_overhead.PARTS) == pytest.approx(1.0)
        assert row["interpreter"] > 0 and 0 < row["ours"] < 1
