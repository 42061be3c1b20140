"""The shares of a simulated call's time: they add up, name the right parts, and are marked as simulated."""

import cProfile
import time

import pytest
import triton

from devtools import simulated_overhead
from tricomm import communicator
from tricomm.kernels.collectives import registry
from tricomm.kernels.device import packing
from tricomm.kernels.launch import triton_adapter


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


def test_files_are_put_where_they_belong() -> None:
    part = simulated_overhead.part
    assert part(triton_adapter.__file__) == "adapter"
    assert part(str(packing.__file__)) == "lines"
    assert part(communicator.__file__) == "host"
    assert part(triton.__file__) == "interpreter"


def test_sleeping_is_waiting() -> None:
    profile = cProfile.Profile()
    profile.runcall(time.sleep, 0.05)
    assert simulated_overhead.shares(profile)["waiting"] > 0.9
