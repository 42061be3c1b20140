"""A batch-invariant reduction depends on rank order only: not on size, split, kernel, shape, chunks or graph.

The numbers are chosen so that another order of summation gives other bits, which the last tests show.
"""

import functools
import operator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tricomm
from tests import ranks
from tests.c10d.bodies import invariance_bodies as c10d
from tests.core.bodies import nccl_bodies
from tests.explorer.mutation import Edit, loaded
from tests.marks import some
from tests.topology.shapes import dgx1v
from tricomm.errors import InvalidArgument
from tricomm.kernels import reference
from tricomm.kernels.collectives import registry
from tricomm.options import Tuning
from tricomm.policy.tuning_tables import TableRow

INVARIANT = tricomm.Options(arena_bytes=256 << 10, batch_invariant=True)
TINY = 80 << 10  # a call of a few hundred elements takes several chunks
TYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "complex64", "int8")
OPS = ("sum", "avg", "prod", "min", "max")
KERNELS = [(None, None), *((k.algorithm, k.protocol) for k in registry.of("all_reduce", 2))]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbers(rank, count, name, seed=0):
    """Of many magnitudes and both signs; of floats now and then an infinity, a NaN or a zero of some sign."""
    draw = torch.Generator().manual_seed(seed * 1009 + rank)
    dtype = getattr(torch, name)
    if name == "int8":
        return torch.randint(-128, 128, (count,), generator=draw, dtype=torch.int8)
    if dtype.is_complex:
        return torch.view_as_complex(numbers(rank, 2 * count, "float32", seed).view(count, 2))
    powers = torch.randint(-6, 7, (count,), generator=draw)
    spread = torch.randn(count, generator=draw, dtype=torch.float64) * 2.0**powers
    if rank < 2:  # these two cancel, and the order decides whether the other ranks' numbers are lost
        spread[::4] = (1 - 2 * rank) * min(2.0**60, torch.finfo(dtype).max / 2)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=torch.float64)
    chosen = torch.randint(0, 60, (count,), generator=draw)
    return torch.where(chosen < 5, special[chosen.clamp(max=4)], spread).to(dtype)


def bits(x):
    """The bits of real numbers; all NaNs are one."""
    x = torch.view_as_real(x).reshape(-1) if x.is_complex() else x
    if x.dtype.is_floating_point:
        nan = x.float().isnan() if x.itemsize == 1 else x.isnan()
        x = x.view(INTEGERS[x.itemsize]).clone()
        x[nan] = 1  # no result of these numbers is the smallest one
        return x
    return x


def in_rank_order(op, name, world_size, count, seed=0):
    return bits(reference.reduced(op, [numbers(r, count, name, seed) for r in range(world_size)]))


@st.composite
def calls(draw):
    """The length of a tensor and the calls that reduce it: the end of each call's part, its kernel and its form."""
    count = draw(st.integers(1, 700))
    cuts = sorted(draw(st.sets(st.integers(1, count), max_size=3)) | {count})
    ways = st.tuples(st.sampled_from(KERNELS), st.sampled_from(["place", "out", "reduce", "handle", "list"]))
    return count, list(zip(cuts, draw(st.lists(ways, min_size=len(cuts), max_size=len(cuts))), strict=True))


def made(comm, x, op, kernel, way):
    """The reduction of `x` on the last rank (on all, but for reduce)."""
    how = dict(zip(("algorithm", "protocol"), kernel, strict=True))
    if way == "out":
        return comm.all_reduce(x, op, torch.full_like(x, 77), **how)
    if way == "list":
        middle = len(x) // 2
        return torch.cat(comm.all_reduce([x[:middle], x[middle:]], op, **how))
    if way == "reduce":
        protocols = [k.protocol for k in registry.of("reduce", 2)]
        comm.reduce(x, comm.world_size - 1, op, protocol=kernel[1] if kernel[1] in protocols else None)
        return x
    if way == "handle":
        handle = comm.symmetric(x.shape, x.dtype)
        handle.local.copy_(x)
        return comm.all_reduce(handle, op).local.clone()
    return comm.all_reduce(x, op, **how)


@settings(
    max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    calls(),
    st.sampled_from(TYPES),
    st.sampled_from(OPS),
    st.sampled_from([2, 3, 5]),
    st.sampled_from([TINY, 1 << 20]),
    st.sampled_from([16, 64, None]),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 3),
)
def test_the_bits_are_those_of_rank_order_however_a_tensor_is_reduced(
    cut, name, op, world_size, arena, tile, blocks, offset
):
    count, pieces = cut
    op = "sum" if name == "complex64" and op not in ("sum", "avg") else op

    def body(comm):
        results, start = [], 0
        for end, (kernel, way) in pieces:
            whole = numbers(comm.rank, count, name)
            beside = torch.zeros(offset + end - start, dtype=whole.dtype)  # which may begin anywhere
            beside[offset:] = whole[start:end]
            results.append(made(comm, beside[offset:], op, kernel, way))
            start = end
        return torch.cat(results)

    options = replace(INVARIANT, arena_bytes=arena, _tuning=Tuning(tile=tile, blocks=blocks))
    result = bits(tricomm.simulate(body, world_size, options=options)[-1])
    assert torch.equal(result, in_rank_order(op, name, world_size, count))


@pytest.mark.parametrize("protocol", [k.protocol for k in registry.of("reduce_scatter", 3)])
def test_the_rows_of_a_reduce_scatter_are_those_of_an_all_reduce(protocol):
    def body(comm):
        x = numbers(comm.rank, 3 * 201, "bfloat16")
        return comm.reduce_scatter(x, protocol=protocol)

    result = torch.cat(tricomm.simulate(body, 3, options=INVARIANT))
    assert torch.equal(bits(result), in_rank_order("sum", "bfloat16", 3, 603))


def test_compiled_kernels_eager_and_in_a_graph():
    """A tensor reduced as a whole in a graph, and in parts eagerly, by the PTX of a GPU's kernels."""
    count = 1100  # beyond a tile

    def body(comm):
        x = numbers(comm.rank, count, "float32")
        parts = [comm.all_reduce(p.clone()) for p in x.split([1, 333, count - 334])]
        comm.all_reduce(x.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x.clone()
            comm.all_reduce(y)
        graph.replay()
        y, parts = y.clone(), torch.cat(parts)
        reason = comm.explain("all_reduce", 4 * count, mode="graph").reason
        comm.close()
        return y, parts, reason

    for y, parts, reason in tricomm.simulate(
        body, 3, compiled="sm_90", options=replace(INVARIANT, arena_bytes=2 << 20)
    ):
        want = in_rank_order("sum", "float32", 3, count)
        assert torch.equal(bits(y), want) and torch.equal(bits(parts), want) and "batch-invariant" in reason


# The option


def test_a_split_stays_batch_invariant_and_explain_says_so(url):
    for options, split, reason, moved in ranks.run(3, in_a_split, url):
        assert options and split in (True, None)
        assert "batch-invariant: in rank order, rounded once" in reason and "nothing is reduced" in moved


def in_a_split(rank, world_size, tell, url):
    options = replace(INVARIANT, timeout=30.0)
    with tricomm.init(url, rank, world_size, "cpu", options=options) as comm:
        half = comm.split([2, 0])
        inherited = None if half is None else half.options.batch_invariant
        if half is not None:
            with pytest.raises(InvalidArgument, match="needs 8 ranks"):
                half.all_reduce(torch.ones(3), algorithm="hybrid_cube_mesh")
            half.close()
        reasons = [comm.explain(name, 64).reason for name in ("all_reduce", "all_gather")]
        return comm.options.batch_invariant, inherited, *reasons


def test_a_rank_that_differs_is_named_on_every_rank(url):
    for rank, text in enumerate(ranks.run(2, differing, url)):
        assert f"rank {1 - rank} " in text or f"rank {rank} " in text
        assert "other options" in text and "TRICOMM_* variables" in text


def differing(rank, world_size, tell, url):
    with pytest.raises(tricomm.RendezvousError) as error:
        tricomm.init(url, rank, world_size, "cpu", options=replace(INVARIANT, timeout=20.0, batch_invariant=rank == 0))
    return str(error.value)


def test_no_size_is_routed_to_nccl_and_calls_that_only_nccl_has_are_refused(url):
    for equal, stats, refused, value in ranks.run(3, beside_nccl, url, timeout=120):
        assert equal and stats["nccl"] == {"broadcast": 1}
        assert "sum of uint32 is refused in a batch-invariant group: no kernel takes torch.uint32" in refused[0]
        assert refused == [refused[0]] * 2 and value == 3.0


def beside_nccl(rank, world_size, tell, url):
    with nccl_bodies.joined(rank, world_size, url, batch_invariant=True) as comm:
        count = nccl_bodies.LIMIT  # four times the threshold
        total = comm.all_reduce(numbers(rank, count, "float32"))
        equal = torch.equal(bits(total), in_rank_order("sum", "float32", world_size, count))
        refused = []
        for call in (
            lambda: comm.all_reduce(torch.ones(3, dtype=torch.uint32)),
            lambda: comm.explain("all_reduce", 8, torch.uint32),
        ):
            with pytest.raises(InvalidArgument) as error:
                call()
            refused.append(str(error.value))
        comm.broadcast(torch.ones(3, dtype=torch.uint32), 0)  # moves, and reduces nothing
        return equal, tricomm.stats(), refused, comm.all_reduce(torch.ones(2))[0].item()


# Under torch.distributed


@pytest.mark.parametrize(("route", "count"), [("gloo", c10d.COUNT), ("kernels", 2501)])
def test_every_way_to_reduce_has_the_bits_of_rank_order(route, count, url):
    assert ranks.run(3, c10d.bits_of_every_way, url, route, count) == [[]] * 3


def test_groups_of_other_backends_are_wrapped_or_refused(url):
    assert ranks.run(3, c10d.over_other_backends, url) == [[]] * 3


def test_a_rank_of_a_c10d_group_that_differs_is_named_on_every_rank(url):
    for text in ranks.run(3, c10d.one_differs, url):
        assert "TRICOMM_BATCH_INVARIANT" in text and "on every rank or on none" in text


# Without the mode the tests above fail

SMALL = TableRow("all_reduce", 8, 256, "hybrid_cube_mesh", "ll")
ROWS = (SMALL, TableRow("all_reduce", 8, None, "two_shot", "simple"))


REDUCE = "return finish(accumulate(parts, SPEC.WORLD_SIZE, SPEC), SPEC)"


def test_kernels_that_reduce_in_another_order_have_other_bits():
    def body(comm):
        return comm.all_reduce(numbers(comm.rank, 100, "bfloat16"))

    backwards = REDUCE.replace("parts", "(parts[2], parts[1], parts[0])")
    with loaded((Edit("kernels/reduction.py", REDUCE, backwards),)):
        result = bits(tricomm.simulate(body, 3, options=INVARIANT)[0])
    assert not torch.equal(result, in_rank_order("sum", "bfloat16", 3, 100))


@functools.cache
def split_on_a_cube_mesh(batch_invariant):
    """On a cube mesh whose table has two kernels: the bits of one call of 100 elements, and of calls of 30."""

    def body(comm):
        comm.use_table(ROWS, "mine")
        x = numbers(comm.rank, 100, "float32")
        parts = torch.cat([comm.all_reduce(p.clone()) for p in x.split(30)])
        return bits(comm.all_reduce(x)), bits(parts)

    options = replace(INVARIANT, batch_invariant=batch_invariant, arena_bytes=1 << 20, topology=dgx1v())
    return tricomm.simulate(body, 8, options=options)[0]


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_cube_mesh_for_small_calls_changes_bits_unless_the_group_is_batch_invariant(batch_invariant):
    whole, parts = split_on_a_cube_mesh(batch_invariant)
    assert torch.equal(whole, in_rank_order("sum", "float32", 8, 100))
    assert torch.equal(whole, parts) == batch_invariant


def test_forcing_a_cube_mesh_is_refused():
    def body(comm):
        with pytest.raises(InvalidArgument, match="hybrid_cube_mesh/ll adds the sums of two quads.*one_shot/ll"):
            comm.all_reduce(torch.ones(3), algorithm="hybrid_cube_mesh", protocol="ll")
        return comm.all_reduce(torch.ones(3))[0].item()

    assert tricomm.simulate(body, 8, options=replace(INVARIANT, arena_bytes=1 << 20)) == [8.0] * 8


@pytest.mark.parametrize("name", some(["float32", "bfloat16", "float16"], 2))
def test_other_orders_of_these_numbers_have_other_bits(name):
    parts = [numbers(rank, 400, name) for rank in range(3)]
    ordered = bits(reference.reduced("sum", parts))
    backwards = bits(reference.reduced("sum", parts[::-1]))
    rounded = bits(functools.reduce(lambda a, b: operator.add(a.float(), b.float()).to(a.dtype), parts))
    assert (ordered != backwards).sum() > 2
    assert name == "float32" or (ordered != rounded).sum() > 20
