"""All-reduce of rows with an epilogue: bits whatever the kernel and its shape, special values, chunks, epochs, and what
each protection is for."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import tricomm
from tests.core.fused import fused_reference as reference
from tests.explorer.mutation import Edit, loaded
from tests.marks import compiles, some
from tricomm.core import launch_plan
from tricomm.explorer.campaign import smallest
from tricomm.kernels.collectives import registry
from tricomm.kernels.specialization import Specialization
from tricomm.options import tuned

WAYS = [("one_shot", "ll"), ("two_shot", "ll"), ("one_shot", "ll128"), ("two_shot", "ll128")]
SMALL = tuned(smallest(2), blocks=2, tile=32)  # of ll128 there is no smaller one


def results(comm, x, residual, weight, way, eps=1e-5):
    result = comm.all_reduce_rms_norm_quantized(
        x,
        residual,
        weight,
        eps,
        quantize="fp8_per_token",
        norm_out=torch.full_like(x, 9),
        algorithm=way[0],
        protocol=way[1],
    )
    return result.norm, result.residual, result.codes.view(torch.uint8), result.scales


def same(a, b):
    return all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("dtype", "rows", "hidden", "world_size"),
    some(
        [(torch.bfloat16, 5, 264, 3), (torch.float16, 3, 8, 4), (torch.float32, 7, 200, 2), (torch.half, 1, 4096, 2)], 4
    ),
)
def test_the_bits_do_not_depend_on_kernel_tiles_grid_chunks_or_alignment(dtype, rows, hidden, world_size):
    def body(comm, offset=0):
        draw = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(rows * hidden + 1, generator=draw).to(dtype)[offset:][: rows * hidden].view(rows, hidden)
        x = x if offset else x.clone()
        residual = torch.full((rows, hidden), 0.25 * comm.rank).to(dtype)  # another one on each rank
        weight = torch.linspace(-2, 2, hidden).to(dtype)
        total = comm.all_reduce(x.clone())
        observed = [results(comm, x, residual, weight, way) for way in WAYS]
        assert torch.equal(observed[0][1], (total.float() + residual.float()).to(dtype))
        exact = reference.norm_of(observed[0][1], weight, 1e-5)
        assert reference.within_an_ulp(observed[0][0], exact)
        assert all(same(observed[0], other) for other in observed[1:])
        return observed[0]

    large = tricomm.simulate(body, world_size)
    memory = SMALL.arena_bytes * (2 if world_size > 3 else 1)  # for such tiles of all kernels
    small = tricomm.simulate(body, world_size, options=replace(SMALL, arena_bytes=memory))
    assert all(same(a, b) for a, b in zip(large, small, strict=True))


def test_a_tensor_that_begins_anywhere():
    def body(comm):
        flat = torch.randint(-4, 5, (3 * 24 + 1,), generator=torch.Generator().manual_seed(comm.rank)).half()
        x, weight = flat[comm.rank :][: 3 * 24].view(3, 24), torch.ones(25).half()[comm.rank :][:24]
        apart, kept = x.clone(), weight.clone()
        for way in WAYS:
            assert same(results(comm, x, None, weight, way), results(comm, apart, None, kept, way))
        return True

    assert tricomm.simulate(body, 2, options=SMALL) == [True, True]


@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float32, torch.float16], 3))
def test_special_values(dtype):
    """A huge row, a tiny one, zeros, an infinity, a NaN; huge and tiny eps."""
    big = torch.finfo(dtype).max / 4
    tiny = torch.finfo(dtype).tiny * (1 if dtype == torch.float16 else 2.0**30)

    def body(comm):
        x = torch.zeros(6, 32, dtype=dtype)
        x[1], x[2] = big, tiny
        x[1, ::2] *= -0.5
        x[3, 5], x[4, 7], x[5] = math.inf, math.nan, comm.rank + 1.0
        weight = torch.ones(32, dtype=dtype)
        return [results(comm, x, None, weight, way, eps) for way in WAYS[1::2] for eps in (1e-30, 1e-5, 1e20)]

    ranks = tricomm.simulate(body, 2)
    assert all(same(a, b) for other in ranks[1:] for a, b in zip(ranks[0], other, strict=True))
    for number, (norm, residual, codes, scales) in enumerate(ranks[0]):
        eps = (1e-30, 1e-5, 1e20)[number % 3]
        exact = reference.norm_of(residual, torch.ones(32, dtype=dtype), torch.tensor(eps).double())
        sound = [0, 1, 2, 5]
        assert reference.within_an_ulp(norm[sound], exact[sound])
        assert norm[3].isnan().sum() == 1 and norm[3, 5].isnan() and not norm[3, 6].isnan()
        assert norm[4].isnan().all() and (codes[4] & 0x7F == 0x7F).all()
        assert not codes[0].any() and scales[0, 0] == torch.tensor(1 / (512 * 448))


@pytest.mark.parametrize("epoch", [(1 << 30) - 2, pytest.param((1 << 32) - 2, marks=pytest.mark.exhaustive)])
def test_epochs_wrap_around_with_several_chunks(epoch):
    def body(comm):
        for seed, way in enumerate(WAYS[:2]):
            x, residual, weight = reference.inputs(comm.rank, 9, 264, torch.float32, seed)
            result = results(comm, x, residual, weight, way)
            assert torch.equal(result[1].double(), reference.summed(2, 9, 264, torch.float32, seed))
        return True

    assert tricomm.simulate(body, 2, options=tuned(SMALL, first_epoch=epoch)) == [True, True]


def test_planes_of_rows_are_those_of_wide_words():
    for hidden in range(8, 400, 8):
        form = Specialization(2, 32, 16, False, WIDE=True, ELEMENT="float16", HIDDEN=hidden, SHARDS=2)
        words = [w for first, n in zip(form.FIRSTS, form.LENGTHS, strict=True) for w in range(first, first + n)]
        assert sorted(words) == list(range(form.ROW))


def calls(comm, way):
    """Rows of several tiles and blocks, then several short ones a block: the later calls find the words of earlier ones
    in the mailboxes."""
    for seed, (rows, hidden) in enumerate([(3, 200), (3, 200), (5, 24)]):
        x, residual, weight = reference.inputs(comm.rank, rows, hidden, torch.float32, seed)
        norm, total, _, _ = results(comm, x, residual, weight, way)
        if not torch.equal(total.double(), reference.summed(2, rows, hidden, torch.float32, seed)):
            raise AssertionError("wrong sums")
        if not reference.within_an_ulp(norm, reference.norm_of(total, weight, 1e-5)):
            raise AssertionError("wrong norm")


ONE_SHOT, TWO_SHOT = (f"kernels/collectives/all_reduce_rows_{name}.py" for name in ("one_shot", "two_shot"))
PRIMITIVES, ROWS = "kernels/primitives.py", "kernels/device/rows.py"
MUTANTS = {
    "the epilogue runs before the last tile has come": (
        ONE_SHOT,
        "lefts = lefts + (SPEC.LEFTS[i + g],)",
        "lefts = lefts + (0,)",
    ),
    "the epilogue runs before the sums have come": (
        TWO_SHOT,
        "lefts = lefts + (SPEC.LEFTS[k * SPEC.WORLD_SIZE + n],)",
        "lefts = lefts + (0,)",
    ),
    "a row ends a word early": (
        ROWS,
        "return SPEC.FIRSTS[n] + lane, lane < SPEC.LENGTHS[n]",
        "return SPEC.FIRSTS[n] + lane, lane < SPEC.LENGTHS[n] - 1",
    ),
    "rows lie over each other in the mailbox": (ONE_SHOT, "this * SPEC.PITCH + i * SPEC.TILE", "i * SPEC.TILE"),
    "the first block moves all epochs on": (
        PRIMITIVES,
        "lacks = tl.where(block == 0, tl.num_programs(0), MAX_BLOCKS)",
        "lacks = tl.where(block == 0, 0, MAX_BLOCKS)",
    ),
    "all blocks read the first one's epoch": (
        PRIMITIVES,
        "return tl.load(words + tl.program_id(0), volatile",
        "return tl.load(words, volatile",
    ),
}


def explored(way, edits):
    """The explorer's report on `calls` with the kernels changed."""
    with loaded(edits):
        changed = launch_plan.registry
        device = __import__(changed.__name__.split(".")[0] + ".device.epilogue", fromlist=["rms_norm"])
        with patch.object(launch_plan, "registry", changed), patch.object(launch_plan, "device", device):
            return tricomm.check(lambda comm: calls(comm, way), 2, schedules=2, options=SMALL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MUTANTS)
def test_the_explorer_notices_each_mistake(name):
    file, old, new = MUTANTS[name]
    way = WAYS[1] if "two_shot" in file else WAYS[0]
    assert not explored(way, (Edit(file, old, new),)).ok


@pytest.mark.exhaustive
@pytest.mark.parametrize(("algorithm", "protocol"), WAYS)
def test_the_explorer_has_no_finding(algorithm, protocol):
    assert explored((algorithm, protocol), ()).ok


@pytest.mark.exhaustive
@pytest.mark.parametrize(("algorithm", "protocol"), [w for w in WAYS if compiles(registry.find("all_reduce", *w))])
def test_compiled_kernels_have_no_finding_and_the_same_bits(algorithm, protocol):
    way = algorithm, protocol

    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, 2, 48, torch.bfloat16)
        return results(comm, x, residual, weight, way)

    plain = tricomm.simulate(body, 2)
    assert same(plain[0], tricomm.simulate(body, 2, compiled="sm_90")[0])
    assert tricomm.check(body, 2, schedules=2, compiled="sm_90").ok
