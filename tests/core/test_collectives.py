"""Every collective under every kernel, exactly: types, operations, sizes, alignments, roots, lists, sequences."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tricomm
from tests.core.bodies.exact import Made, anything, outcome
from tests.marks import some
from tests.topology.shapes import dgx1v
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES
from tricomm.options import Tuning

SMALL = tricomm.Options(
    arena_bytes=128 << 10, _tuning=Tuning(blocks=2, tile=32)
)  # messages of several chunks, blocks without words
PLAIN = [k for k in (*registry.KERNELS, *registry.MULTICAST) if not k.needs_cube and k.collective != "barrier"]
CUBE = [k for k in registry.KERNELS if k.needs_cube]
SOAK = pytest.mark.soak


def wrong(world_size, cases, options=SMALL, seed=0):
    """Make the cases in turn on every rank; return those that any rank finds wrong."""

    def body(comm):
        return [case for number, case in enumerate(cases) if not outcome(comm, case, number)]

    return [bad for bad in tricomm.simulate(body, world_size, seed, options=options) if bad]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, 1), pytest.param(3, 3, marks=pytest.mark.exhaustive), *[pytest.param(n, 8, marks=SOAK) for n in (1, 2, 3, 5)]],
)
@pytest.mark.parametrize("kernel", PLAIN, ids=lambda k: k.name)
def test_every_kernel(kernel, world_size, cases):
    draw = random.Random(f"{kernel.name} {world_size}")
    assert wrong(world_size, [anything(draw, kernel) for _ in range(cases)]) == []


@pytest.mark.parametrize("kernel", some(CUBE, 3), ids=lambda k: k.name)
@pytest.mark.parametrize(("seed", "most"), [(1, 200), *[pytest.param(n, 2500, marks=SOAK) for n in range(1, 30)]])
def test_every_kernel_of_a_cube_mesh_under_any_labelling(kernel, seed, most):
    draw = random.Random(f"{kernel.name} {seed}")
    labels = draw.sample(range(8), 8)
    options = tricomm.Options(arena_bytes=256 << 10, topology=dgx1v().of(labels), _tuning=Tuning(blocks=2, tile=32))
    assert wrong(8, [anything(draw, kernel, most) for _ in range(3)], options) == []


WIDTHS = {(DTYPES[name].bits, DTYPES[name].lanes): name for name in reversed(DTYPES) if name != "bool"}
# All three reduce by the same code, so every third operation is enough for the other two.
OPERATIONS = [("all_reduce", 1), *[(c, 3) for c in ("reduce_scatter", "reduce")]]
OPERATIONS += [pytest.param(c, 1, marks=SOAK) for c in ("reduce_scatter", "reduce")]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("collective", "step"), some(OPERATIONS, 3))
def test_every_type_and_operation(collective, step, name):
    ops = DTYPES[name].ops[list(DTYPES).index(name) % step :: step]
    cases = [Made(collective, None, None, name, op, 61, 1, "fresh") for op in ops]
    assert wrong(3, cases, tricomm.Options(arena_bytes=256 << 10)) == []


@pytest.mark.parametrize(
    "name", [n if n in WIDTHS.values() or n == "bool" else pytest.param(n, marks=SOAK) for n in DTYPES]
)
def test_every_type_is_copied(name):
    """One type of each width; `make soak` has the others."""
    rest = [c for c in dict.fromkeys(k.collective for k in PLAIN) if "reduce" not in c]
    cases = [Made(c, None, p, name, "sum", 61, 1, "fresh") for c in rest for p in ("ll", "ll128", "simple")]
    assert wrong(2, cases, tricomm.Options(arena_bytes=256 << 10)) == []


@pytest.mark.parametrize(("seed", "calls"), [(0, 12), *[pytest.param(n, 25, marks=SOAK) for n in range(20)]])
def test_any_sequence_of_collectives_back_to_back(seed, calls):
    draw = random.Random(seed)
    cases = [anything(draw, draw.choice(PLAIN)) for _ in range(calls)]
    assert wrong(3, cases, seed=seed) == []


@pytest.mark.parametrize("cube", some([CUBE[1::2], CUBE], 2), ids=len)
def test_any_sequence_on_a_cube_mesh_among_other_kernels(cube):
    draw = random.Random(7)
    kernels = [k for pair in zip(cube, draw.sample(PLAIN, len(cube)), strict=True) for k in pair]
    assert wrong(8, [anything(draw, k, most=40) for k in kernels]) == []


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(PLAIN), st.integers(1, 4))
def test_anything_else(draw, kernel, world_size):
    assert wrong(world_size, [anything(draw, kernel, most=300)]) == []


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], 2))
def test_all_algorithms_give_the_same_bits(dtype):
    """One-shot and two-shot reduce in rank order, the three of a cube mesh by quads; all ranks get the same bits."""

    def body(comm):
        x = torch.randn(125, generator=torch.Generator().manual_seed(comm.rank))
        observed = []
        for k in registry.of("all_reduce", 8):
            y = comm.all_reduce(x.to(dtype, copy=True), algorithm=k.algorithm, protocol=k.protocol)
            observed.append((k.needs_cube, y.view(torch.uint8)))
        return observed

    results = tricomm.simulate(
        body, 8, options=tricomm.Options(arena_bytes=256 << 10, _tuning=Tuning(blocks=1, tile=64))
    )
    groups = {}
    for rank in results:
        for cube, bits in rank:
            groups.setdefault(cube, []).append(bits)
    assert {cube: len(observed) for cube, observed in groups.items()} == {False: 8 * 6, True: 8 * 4}
    assert all(torch.equal(bits, observed[0]) for observed in groups.values() for bits in observed)
    same = torch.equal(groups[True][0], groups[False][0])
    assert not same or dtype != torch.float32, "the orders do differ"


def test_a_list_shares_one_launch():
    def body(comm):
        me, n = comm.rank, comm.world_size
        before = comm._launcher.sequence
        a, b = torch.full((3,), 1.0 + me), torch.arange(8.0).view(4, 2).t() * (me + 1)
        out = comm.all_reduce([a, b])
        assert (
            out[0] is a
            and out[1] is b
            and a.tolist() == [6.0] * 3
            and torch.equal(b, torch.arange(8.0).view(4, 2).t() * 6)
        )
        rows = comm.all_gather([torch.tensor([me, me]), torch.tensor([[10 + me]])])
        assert rows[0].tolist() == [0, 0, 1, 1, 2, 2] and rows[1].tolist() == [[10], [11], [12]]
        shards = comm.reduce_scatter([torch.arange(3), torch.arange(6).view(3, 2)])
        assert shards[0].tolist() == [3 * me] and shards[1].tolist() == [[6 * me, 6 * me + 3]]
        into = [torch.full((1,), -1), torch.full((2,), -1)]
        got = comm.scatter([torch.arange(3), torch.arange(6)] if me == 1 else None, 1, into)
        assert got[0] is into[0] and got[0].tolist() == [me] and got[1].tolist() == [2 * me, 2 * me + 1]
        assert [t.tolist() for t in comm.broadcast([torch.tensor([me]), torch.tensor([me, 5])], 2)] == [[2], [2, 5]]
        mixed = comm.all_to_all([torch.arange(n) + 10 * me, torch.arange(2 * n) + 100 * me])
        assert mixed[0].tolist() == [me, 10 + me, 20 + me] and mixed[1][:2].tolist() == [2 * me, 2 * me + 1]
        gathered = comm.gather([torch.tensor([me]), torch.tensor([me, me])], 0)
        assert (gathered is None) == (me != 0)
        assert me or [t.tolist() for t in gathered] == [[0, 1, 2], [0, 0, 1, 1, 2, 2]]
        reduced = comm.reduce([torch.tensor([me]), torch.tensor([me, 1])], 1, "max")
        assert (reduced is None) == (me != 1)
        assert me != 1 or [t.tolist() for t in reduced] == [[2], [2, 1]]
        return comm._launcher.sequence - before

    assert tricomm.simulate(body, 3) == [8] * 3


def test_outputs_on_ranks_that_receive_nothing_are_unchanged():
    def body(comm):
        x = torch.tensor([1.0 + comm.rank, 5.0])
        got = comm.reduce(x, 1)
        return x.tolist(), got is x, comm.gather(x, 1) is None

    assert tricomm.simulate(body, 3) == [
        ([1.0, 5.0], False, True),
        ([6.0, 15.0], True, False),
        ([3.0, 5.0], False, True),
    ]


def test_zero_elements_launch_nothing():
    def body(comm):
        none = torch.empty(0)
        comm.all_reduce(none)
        comm.broadcast(none, 0)
        comm.all_to_all(none)
        comm.reduce_scatter(torch.empty(0, 4))
        assert comm.gather(none, 0) is None or comm.rank == 0
        return comm._launcher.sequence

    assert tricomm.simulate(body, 2) == [0, 0]


X = torch.ones(6)
REFUSED = {
    "a root outside": (lambda c: c.broadcast(X, 3), "broadcast src=3: a rank from 0 to 2"),
    "a root that is no rank": (lambda c: c.reduce(X, True), "reduce dst=True"),
    "rows that do not divide": (lambda c: c.reduce_scatter(torch.ones(7)), "not a multiple of the world size 3"),
    "a scalar": (lambda c: c.all_to_all(torch.tensor(1.0)), "not a multiple"),
    "a list of two types": (lambda c: c.all_reduce([X, X.int()]), "tensors of one dtype are needed"),
    "an empty list": (lambda c: c.all_reduce([]), "empty list"),
    "fewer outputs": (lambda c: c.all_gather([X, X], [torch.ones(18)]), "2 tensors were given and 1 outputs"),
    "no tensor in a list": (lambda c: c.all_reduce([X, 3]), "a torch.Tensor is needed, found int"),
    "an output that overlaps": (lambda c: c.all_to_all(X, X), "out overlaps the input"),
    "half an overlap": (lambda c: c.reduce_scatter(X, out=X[1:3] if c.rank != 0 else X[3:5]), "overlaps"),
    "an output elsewhere": (lambda c: c.gather(X, (c.rank + 1) % 3, torch.ones(18)), "out is for rank"),
    "a source without data": (lambda c: c.scatter(None, c.rank, torch.ones(2)), "gave no x"),
    "no shape known": (lambda c: c.scatter(None, (c.rank + 1) % 3), "neither out nor x"),
    "an op that a type lacks": (lambda c: c.all_reduce(X, "band"), "all_reduce: op 'band' is not defined for float32"),
    "complex max": (lambda c: c.reduce(X.to(torch.complex64), 0, "max"), "there is sum, avg"),
    "splits that do not add up": (lambda c: c.all_to_all_v(X, [1, 2, 4], [2] * 3), "add up to 7"),
    "splits of fewer ranks": (lambda c: c.all_to_all_v(X, [3, 3], [2] * 3), "in_splits=.*3 numbers of rows"),
    "a negative split": (lambda c: c.all_to_all_v(X, [2] * 3, [7, -1, 0]), "out_splits"),
    "itself": (lambda c: c.all_to_all_v(X, [2, 2, 2], [2 + (r == c.rank) for r in range(3)]), "sends itself 2 rows"),
    "an output of another type": (lambda c: c.all_gather(X, torch.ones(18).int()), "out has dtype"),
    "an unknown algorithm": (lambda c: c.all_to_all(X, algorithm="ring"), "no ring kernel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_and_the_group_still_works(name):
    call, words = REFUSED[name]

    def body(comm):
        with pytest.raises(InvalidArgument, match=words):
            call(comm)
        return comm._launcher.sequence, comm.all_reduce(torch.ones(2)).tolist()

    assert tricomm.simulate(body, 3) == [(0, [3.0, 3.0])] * 3


def test_rows_of_another_length_than_expected_are_named_on_all_ranks():
    def body(comm):
        out = [2, 2] if comm.rank == 0 else [1, 2]
        try:
            comm.all_to_all_v(torch.ones(4, 3), [2, 2], out)
            comm.barrier()  # rank 0 got the rows that it expected, and learns of the error here at the latest
        except tricomm.CollectiveMismatch as error:
            return str(error)

    result = tricomm.simulate(body, 2)
    assert all("rank 0 sends rank 1 6 elements" in text and "out_splits[0]" in text for text in result)


def test_a_topology_of_another_size_is_refused():
    with pytest.raises(InvalidArgument, match="Options.topology is of 8 devices, the group has 2 ranks"):
        tricomm.simulate(lambda comm: None, 2, options=tricomm.Options(topology=dgx1v()))
    with pytest.raises(InvalidArgument, match="a Topology, or a file"):
        tricomm.Options(topology=3)
