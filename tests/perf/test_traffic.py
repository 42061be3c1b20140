"""Every kernel moves exactly the bytes that the registry promises, on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from tricomm.kernels import registry
from tricomm.perf.traffic import Counter, Moved, count

KERNELS = {k.name for k in registry.KERNELS if k.collective != "barrier"}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_are_those_of_the_formula(world_size: int) -> None:
    found = list(count(world_size, 16 * world_size * 24))
    assert {m.kernel.name for m in found} == KERNELS and len(found) == len(KERNELS) * world_size
    assert {(m.kernel.name, m.rank): m.ratio for m in found if m.ratio != 1.0} == {}
    assert all(m.headers > 0 and m.headers % (8 * (world_size - 1)) == 0 for m in found)
    least = {m.rank for m in found if m.kernel.name == "all_reduce_two_shot_simple" and m.written + m.read == m.optimum}
    assert least == set(range(world_size))


def test_the_counter_sees_peers_only_and_headers_apart() -> None:
    counter = Counter([(10_000, 8192)], headers_end=4096)
    for kind, first in (("store", 10_000 + 1024), ("load", 10_000 + 4096), ("store", 10_000 + 5000), ("store", 0)):
        counter(kind, np.arange(first, first + 32, 8, dtype=np.uint64), 8)
    counter("store", np.array([18_192], dtype=np.uint64), 8)
    assert (counter.headers, counter.read, counter.written) == (32, 32, 32)


def test_a_byte_too_many_is_not_one() -> None:
    exact = Moved("all_reduce", "two_shot", "simple", 0, 0, 0, 0, 0, 0)
    right = Moved("all_reduce", "two_shot", "simple", 4, 0, 1024, 1536, 0, 8)
    assert right.ratio == 1.0 and exact.simulated
    assert Moved("all_reduce", "two_shot", "simple", 4, 0, 1024, 1544, 0, 8).ratio > 1.0
    assert Moved("all_reduce", "two_shot", "simple", 4, 0, 1024, 1528, 8, 8).ratio == float("inf")
