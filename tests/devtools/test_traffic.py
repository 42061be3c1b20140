"""Every kernel moves exactly the bytes that the registry promises, on every rank."""

import numpy as np
import pytest

from devtools.traffic import Counter, Moved, count
from tests.marks import some
from tests.topology.shapes import dgx1v
from tricomm.kernels.collectives import registry


def kernels(cube: bool) -> dict[str, registry.Kernel]:
    shipped = (*registry.KERNELS, *registry.MULTICAST, *registry.WIRE)
    return {k.name: k for k in shipped if k.collective != "barrier" and k.needs_cube == cube}


@pytest.mark.parametrize("world_size", some([2, 3, 4], lambda _, size: size < 4))
@pytest.mark.usefixtures("forked_workers")
def test_bytes_are_those_of_the_formula(world_size: int) -> None:
    """The bytes of every rank; of the busiest ones if there is a root."""
    every = list(count(world_size, 16 * world_size * 24, quantized=("", "nvfp4") if world_size == 3 else ("",)))
    fused, every = ([m for m in every if (m.form != "") is kind] for kind in (True, False))
    assert {m.kernel for m in fused} == set(registry.of("all_reduce_rms_norm", world_size))
    assert {(m.kernel.name, m.form, m.rank): m.ratio for m in fused if m.ratio != 1.0} == {}
    sent, result = ([m for m in every if m.kernel.pairwise is kind] for kind in (True, False))
    assert [(m.kernel.name, m.rank, m.ratio, m.headers) for m in sent] == [
        (f"send_{p}", 0, 1.0, 16) for p in ("ll", "simple")
    ]
    assert {m.kernel.name for m in result} == set(kernels(False)) and len(result) == len(kernels(False)) * world_size
    for name, kernel in kernels(False).items():
        ratios = [m.ratio for m in result if m.kernel.name == name]
        assert max(ratios) == 1.0 and (kernel.kind.root or min(ratios) == 1.0), (name, ratios)
    assert all(m.headers > 0 and m.headers % (8 * (world_size - 1)) == 0 for m in result)
    for name in ("all_reduce_two_shot_simple", "all_gather_one_shot_simple", "reduce_scatter_one_shot_simple"):
        assert all(m.written + m.read == m.optimum for m in result if m.kernel.name == name), name


@pytest.mark.usefixtures("forked_workers")
def test_nothing_crosses_a_link_that_a_cube_mesh_lacks() -> None:
    results = list(count(8, 16 * 8 * 24))
    assert {m.kernel.name for m in results} == set(kernels(True)) and len(results) == len(kernels(True)) * 8
    assert {(m.kernel.name, m.rank): m.ratio for m in results if m.ratio != 1.0} == {}
    links = dgx1v().links
    for m in results:
        used = {other for other, moved in enumerate(m.links) if moved}
        assert used == {other for other, there in enumerate(links[m.rank]) if there}, (m.kernel.name, m.rank)
        assert sum(m.links) == m.written + m.headers
    assert all(
        m.written == m.optimum for m in results if m.kernel.name == "all_reduce_hybrid_cube_mesh_two_shot_simple"
    )


def test_the_counter_sees_peers_only_and_headers_apart() -> None:
    counter = Counter([(10_000, 8192)], (1024, 4096))
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
