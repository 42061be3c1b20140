"""An all-reduce that is quantised on the links: exactly the codes that are documented, on every rank the same bits."""

import itertools
import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tricomm
from tests import ranks
from tests.marks import some
from tricomm.errors import CollectiveMismatch, InvalidArgument
from tricomm.kernels import layout, reference
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES
from tricomm.options import Options, tuned
from tricomm.policy import backend_choice, selection
from tricomm.policy.selection_facts import SelectionFacts

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
WORDS = {2: torch.int16, 4: torch.int32}
# Elements: none of a second block, the ends of blocks, of tiles, of shards; several tiles a rank.
SIZES = (1, 2, 127, 128, 129, 1000, 3 * 1024 + 1, 5 * 2048 + 77)
SMALL = tuned(Options(arena_bytes=256 << 10), tile=64)


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many magnitudes, some blocks with one outlier, of zeros, of denormals; some with infinities and NaN."""
    draw = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(count, generator=draw, dtype=torch.float64)
    info = torch.finfo(dtype)
    for block, part in enumerate(x.split(128)):
        kind = block % 11
        if kind == 1:
            part[-1] *= 4096
        elif kind == 2:
            part.zero_()
        elif kind == 3:
            part *= info.smallest_normal / 8
        elif kind == 4:
            part[0] = (math.inf, -math.inf)[rank % 2]
        elif kind == 5:
            part[len(part) // 2] = math.nan if rank == 1 else math.inf
        elif kind == 6:
            part.copy_(torch.where(part > 0, info.max, info.min))  # sums overflow
        elif kind == 7:
            part.mul_(0).neg_()  # zeros of both signs
        elif kind == 8:
            part.copy_(torch.exp2(torch.randint(-30, 30, part.shape, generator=draw).double()).clamp(max=info.max))
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits, with one pattern for every NaN."""
    return torch.where(x.isnan(), 0x7A5A, x.view(WORDS[x.itemsize]))


def check_exact(world_size: int, wire: str, dtype: torch.dtype, size: int, **more: Any) -> None:
    op, options, protocol = more.get("op", "sum"), more.get("options"), more.get("protocol")
    parts = [numbers(r, size, dtype) for r in range(world_size)]
    want = reference.quantised(wire, op, parts)

    def fn(comm: tricomm.Communicator) -> torch.Tensor:
        out = torch.full((size,), 3.5, dtype=dtype)
        x = numbers(comm.rank, size, dtype)
        assert comm.all_reduce(x, op, out, wire=wire, protocol=protocol) is out
        assert torch.equal(bits(x), bits(numbers(comm.rank, size, dtype)))
        return out

    first, *others = tricomm.simulate(fn, world_size, options=options)
    assert torch.equal(bits(first), bits(want)), (first - want).abs().max()
    assert all(torch.equal(first.view(WORDS[dtype.itemsize]), other.view(WORDS[dtype.itemsize])) for other in others)


KERNELS = [(kernel.wire, kernel.protocol) for kernel in registry.WIRE]
EVERY = [(*kernel, dtype, size) for kernel, dtype, size in itertools.product(KERNELS, FLOATS, SIZES)]


@pytest.mark.parametrize("wire, protocol, dtype, size", some(EVERY, 24, lambda number, value: number % 3 == 0))
def test_every_rank_has_the_documented_bits(wire, protocol, dtype, size):
    for world_size in (2, 3) if size > 2000 else (2, 5):
        check_exact(world_size, wire, dtype, size, protocol=protocol)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_ranks(world_size):
    for number in (world_size, world_size + 3):
        wire, protocol = KERNELS[number % len(KERNELS)]
        check_exact(world_size, wire, FLOATS[number % 3], 128 * 9 * world_size + 5, op="avg", protocol=protocol)
        check_exact(world_size, wire, FLOATS[(number + 1) % 3], 300, protocol=protocol)  # some ranks have no block


@pytest.mark.parametrize("wire, protocol", KERNELS)
def test_neither_chunks_nor_grid_change_the_bits(wire, protocol):
    """An arena of a few tiles, so that a call takes several chunks, by one block and by three."""
    for dtype in (torch.bfloat16, torch.float32):
        for blocks in (1, 3):
            few = replace(SMALL, _tuning=replace(SMALL._tuning, blocks=blocks))
            check_exact(3, wire, dtype, 9000, options=few, protocol=protocol)


@pytest.mark.parametrize("wire", registry.WIRES)
def test_where_a_tensor_is_does_not_change_the_bits(wire):
    """In place, misaligned, with gaps, in a list; a second call of each is a prepared one."""
    count, parts = 1000, [numbers(r, 1000, torch.bfloat16) for r in range(2)]
    want = reference.quantised(wire, "sum", parts)

    def fn(comm):
        results = []
        for _ in range(2):
            x = parts[comm.rank].clone()
            assert comm.all_reduce(x, wire=wire) is x
            room = torch.full((count + 3,), 7.0, dtype=torch.bfloat16)
            room[1:-2] = parts[comm.rank]
            comm.all_reduce(room[1:-2], wire=wire)
            assert room[0] == 7 and torch.equal(room[-2:], torch.full((2,), 7.0, dtype=torch.bfloat16))
            apart = torch.zeros(count, 2, dtype=torch.bfloat16)
            apart[:, 1] = parts[comm.rank]
            comm.all_reduce(apart[:, 1], wire=wire)
            assert not apart[:, 0].any()
            pieces = [each.clone() for each in parts[comm.rank].split(333)]
            comm.all_reduce(pieces, wire=wire)
            done = comm.all_reduce(parts[comm.rank].clone(), wire=wire, async_op=True).wait()
            results += [x, room[1:-2].clone(), apart[:, 1].clone(), torch.cat(pieces), done]
        return results

    for results in tricomm.simulate(fn, 2):
        assert all(torch.equal(bits(x), bits(want)) for x in results)


def test_known_codes():
    """Values worked out on paper: fp8 scales 448 by 1, 449 by the next power of two; int8 has steps of most / 127."""
    x = torch.zeros(384)
    x[:5] = torch.tensor([448.0, 17.0, 18.0, 19.0, -0.001])  # steps of 2 from 16 to 32; 2^-9 is the least code
    x[128:131] = torch.tensor([449.0, 17.0, 2.0**-7])  # at half of the size: steps of 2 again, and 2^-8 the least
    x[256:260] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    want = torch.zeros(384)
    want[:5] = torch.tensor([448.0, 16.0, 18.0, 20.0, -(2.0**-9)])
    want[128:131] = torch.tensor([448.0, 16.0, 2.0**-7])
    want[256:260] = torch.tensor([128.0, 0.5, 1.5, -2.5])
    assert torch.equal(reference.coded(x, "fp8"), want)
    want = torch.zeros(384)
    want[256:260] = torch.tensor([127.0, 0.0, 2.0, -2.0])  # to even
    assert torch.equal(reference.coded(x, "int8")[256:], want[256:])
    special = torch.tensor([math.inf, 127.0, math.nan, -math.inf, 2.0**-149, -0.0])
    for codes, most in (("fp8", 128), ("int8", 127)):
        left = reference.coded(special, codes)
        assert left.isnan().tolist() == [True, False, True, True, False, False]
        assert left[1] == most and not left[4:].any() and (codes == "int8") != bool(left[5].signbit())


def test_int8_scales_next_to_every_step():
    """Blocks whose largest magnitude is 127 scales, or the number before or after, for each scale of a magnitude."""
    steps = torch.arange(128, 256).float() * 127
    most = torch.stack([torch.nextafter(steps, steps * 0), steps, torch.nextafter(steps, steps * 2)]).view(-1, 1)
    for exponent in (-140, -133, -7, 105):
        blocks = torch.randn(len(most), 128, generator=torch.Generator().manual_seed(exponent)).clamp(-1, 1) * most
        blocks[:, 5:6] = most
        x = torch.ldexp(blocks, torch.tensor(exponent)).flatten()
        (out,) = tricomm.simulate(lambda comm, x=x: comm.all_reduce(x.clone(), wire="int8"), 1)
        assert torch.equal(bits(out), bits(reference.quantised("int8", "sum", [x])))


def test_the_mistake_of_an_unquantised_own_part():
    """If the owner added its part unquantised, all ranks would have the same wrong sum, so they are compared with the
    sum of the codes."""
    parts = [torch.full((256,), 17.0), torch.full((256,), 448.0)]
    parts[0][::128] = 448.0
    outs = tricomm.simulate(lambda comm: comm.all_reduce(parts[comm.rank].clone(), wire="fp8"), 2)
    assert all(torch.equal(out, reference.quantised("fp8", "sum", parts)) for out in outs)
    assert not torch.equal(outs[0], reference.coded(parts[0] + reference.coded(parts[1], "fp8"), "fp8"))


# Refusals before anything is sent


REFUSED = [
    (dict(dtype=torch.int32), "not int32 by sum"),
    (dict(dtype=torch.float64), "not float64 by sum"),
    (dict(dtype=torch.float8_e4m3fn), "not float8_e4m3fn by sum"),
    (dict(op="max"), "not float32 by max"),
    (dict(op="prod"), "not float32 by prod"),
    (dict(wire="fp4"), "wire='fp4': fp8, int8, fp8_gather or None is needed"),
    (dict(wire=True), "wire=True: fp8, int8"),
    (dict(wire=["fp8"]), "fp8, int8"),
    (dict(algorithm="two_shot"), "wire='fp8' with algorithm='two_shot'"),
    (dict(protocol="ll"), "there is no two_shot_fp8/ll kernel"),
    (dict(grad=True), "requires grad"),
    (dict(handle=True), "other kernels take handle.local"),
]


@pytest.mark.parametrize("how, message", REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_call_that_cannot_be_quantised_is_refused_and_the_group_goes_on(how, message):
    how = dict(how)
    dtype, grad, handle = how.pop("dtype", torch.float32), how.pop("grad", False), how.pop("handle", False)

    def fn(comm):
        x = torch.ones(200, dtype=dtype).requires_grad_(grad)
        if handle:
            x = comm.symmetric((200,), dtype)
        with pytest.raises(InvalidArgument) as caught:
            comm.all_reduce(x, **({"wire": "fp8"} | how))
        assert message in str(caught.value)
        with pytest.raises(InvalidArgument, match="all_gather: there is no two_shot_fp8 kernel"):
            comm.all_gather(torch.ones(200), algorithm="two_shot_fp8")
        return comm.all_reduce(torch.ones(200), wire="fp8")

    assert all(torch.equal(y, torch.full((200,), 2.0)) for y in tricomm.simulate(fn, 2))


def test_an_arena_without_room_for_a_block_is_refused_by_name():
    def fn(comm):
        with pytest.raises(InvalidArgument, match="Options.arena_bytes=.* block of 128"):
            comm.all_reduce(torch.ones(200), wire="int8")
        return comm.all_reduce(torch.ones(200))

    options = Options(arena_bytes=64 << 10)
    assert all(torch.equal(y, torch.full((200,), 8.0)) for y in tricomm.simulate(fn, 8, options=options))


@pytest.mark.parametrize("theirs", [None, "int8", "fp8_gather"])
def test_another_wire_on_one_rank_is_a_mismatch_on_all(theirs):
    def fn(comm):
        with pytest.raises(CollectiveMismatch, match="two_shot_fp8"):
            comm.all_reduce(torch.ones(3000), wire="fp8" if comm.rank else theirs)

    tricomm.simulate(fn, 2)


@pytest.mark.parametrize("wire", registry.WIRES)
def test_explain_names_the_kernel_of_a_call_that_asks(wire):
    def fn(comm):
        found = comm.explain("all_reduce", 4000, torch.bfloat16, wire=wire)
        comm.all_reduce(torch.ones(2000, dtype=torch.bfloat16), wire=wire)
        counted = [(each.algorithm, each.protocol) for each in comm.stats().calls]
        refused = []
        for collective, more in (
            ("all_gather", {}),
            ("all_reduce_rms_norm", {"hidden": 8}),
            ("all_reduce", {"dtype": torch.int32}),
            ("all_reduce", {"algorithm": "two_shot"}),
            ("all_reduce", {"wire": "fp4"}),
        ):
            with pytest.raises(InvalidArgument) as caught:
                comm.explain(collective, 4096, **({"wire": wire} | more))
            refused.append(str(caught.value))
        return (found.algorithm, found.protocol), counted, found.reason, refused

    for kernel, counted, reason, refused in tricomm.simulate(fn, 2):
        flags = "simple" if wire == "fp8_gather" else "ll128"
        assert [kernel] == counted and kernel == (registry.algorithm_of(wire), flags) and "forced" in reason
        assert all("only an all_reduce has it" in text for text in refused[:2])
        assert "not int32 by sum" in refused[2] and "give one of them" in refused[3] and "wire='fp4'" in refused[4]


# A group's option


MIB = (1 << 20) // 4


def test_a_group_quantises_from_a_mebibyte_on_and_says_so():
    x = torch.full((MIB,), 17.0)
    x[::128] = 448.0

    def fn(comm):
        found = {
            "long": comm.explain("all_reduce", 4 * MIB),
            "short": comm.explain("all_reduce", 4 * MIB - 4),
            "integers": comm.explain("all_reduce", 4 * MIB, torch.int32),
            "most": comm.explain("all_reduce", 4 * MIB, op="max"),
            "forced": comm.explain("all_reduce", 4 * MIB, algorithm="two_shot"),
            "gather": comm.explain("all_gather", 4 * MIB),
        }
        y = comm.all_reduce(x.clone())
        comm.all_reduce(x[: MIB // 2].clone())
        counted = {(each.algorithm, each.protocol) for each in comm.stats().calls}
        return found, y, counted

    for found, y, counted in tricomm.simulate(fn, 2, options=Options(wire="fp8")):
        names = {name: choice.algorithm for name, choice in found.items()}
        assert names["long"] == "two_shot_fp8"
        assert "Options(wire='fp8') or TRICOMM_WIRE" in found["long"].reason
        assert not any("fp8" in name for key, name in names.items() if key != "long"), names
        assert torch.equal(y, reference.quantised("fp8", "sum", [x, x]))
        assert ("two_shot_fp8", "simple") in counted and len(counted) == 2


def test_the_environment_sets_it_for_every_group(monkeypatch):
    monkeypatch.setenv("TRICOMM_WIRE", "int8")
    assert tricomm.simulate(lambda comm: comm.options.wire, 1) == ["int8"]
    assert tricomm.simulate(lambda comm: comm.options.wire, 1, options=Options(wire="fp8")) == ["fp8"]
    monkeypatch.setenv("TRICOMM_WIRE", "e5m2")
    with pytest.raises(InvalidArgument, match="TRICOMM_WIRE='e5m2': fp8, int8, fp8_gather or no value"):
        tricomm.simulate(lambda comm: None, 1)


def test_a_batch_invariant_group_refuses_it(monkeypatch):
    with pytest.raises(InvalidArgument, match="Options.wire='fp8' .* batch-invariant"):
        Options(wire="fp8", batch_invariant=True)

    def fn(comm):
        with pytest.raises(InvalidArgument, match="two_shot_fp8 makes elements of a block depend on each other"):
            comm.all_reduce(torch.ones(200), wire="fp8")

    tricomm.simulate(fn, 2, options=Options(batch_invariant=True))
    monkeypatch.setenv("TRICOMM_BATCH_INVARIANT", "1")
    with pytest.raises(InvalidArgument, match="batch-invariant"):
        tricomm.simulate(lambda comm: None, 1, options=Options(wire="fp8"))


def other_wire(rank: int, world_size: int, tell: object, url: str) -> str:
    ranks.together(url, rank, range(world_size))
    with pytest.raises(tricomm.RendezvousError) as caught:
        tricomm.init(url, rank, world_size, "cpu", options=Options(wire="fp8" if rank else "int8"))
    return str(caught.value)


def test_ranks_that_differ_in_the_option_do_not_meet(url):
    assert all("option" in text.lower() for text in ranks.run(2, other_wire, url))


def test_when_a_group_quantises():
    """By architecture, and with one leg alone not where a switch adds."""

    def first(device: str, wire: str, switch: bool = False, dtype: str = "bfloat16", op: str = "sum") -> int | None:
        facts = SelectionFacts(device, 8, layout.plan(8, 64 << 20), 32, wire=wire)
        facts = replace(facts, no_multicast="" if switch else "there is none")
        facts = selection.for_reduction(facts, "all_reduce", DTYPES[dtype], op)
        sizes = (n << 18 for n in range(1, 200))
        found = (n for n in sizes if "two_shot_" in selection.choose(facts, "all_reduce", n, bits=16).algorithm)
        return next(found, None)

    for device in ("sm_89", "sm_90", "sm_100", "sm_103"):
        assert first(device, "fp8") == 1 << 20
    assert first("sm_80", "int8") == 1 << 20 and first("sm_90", "fp8", switch=True) == 1 << 20
    assert first("sm_90", "fp8_gather") == 4 << 20 and first("sm_90", "fp8_gather", switch=True) is None
    assert first("sm_90", "fp8", dtype="float64") is None and first("sm_90", "fp8", op="max") is None


def test_flags_are_in_the_data_of_calls_that_they_make_shorter():
    """Between fast links up to 4 MiB, elsewhere up to 256 KiB, and nowhere without wide words."""

    def protocol(device: str, nbytes: int, algorithm: str | None = None) -> str:
        kind, _, links = device.partition(" ")
        facts = SelectionFacts(kind, 4, layout.plan(4, 64 << 20), 32, wire="fp8", topology=links)
        return selection.choose(facts, "all_reduce", nbytes, algorithm, bits=16).protocol

    for device, last in (("sm_90", 4 << 20), ("sm_103", 4 << 20), ("sm_89", 256 << 10), ("sm_90 pcie", 256 << 10)):
        assert [protocol(device, n, "two_shot_fp8") for n in (1, last, last + 1)] == ["ll128", "ll128", "simple"]
    assert [protocol("sm_90", n) for n in (1 << 20, 5 << 20)] == ["ll128", "simple"]
    with patch.object(selection.wide_words, "why_not", lambda *facts: "this Triton has none"):
        assert protocol("sm_90", 1 << 20, "two_shot_fp8") == "simple"
        assert selection.wire_from(SelectionFacts("sm_90", 4, layout.plan(4, 64 << 20), 32, wire="fp8")) == 2 << 20


@pytest.mark.parametrize("device, message", [("sm_80", "sm_80 has no e4m3"), ("cuda", "several architectures")])
def test_an_architecture_without_e4m3_is_refused_by_name(device, message):
    for wire in ("fp8", "fp8_gather"):
        facts = SelectionFacts(device, 4, layout.plan(4, 64 << 20), 32, wire=wire)
        with pytest.raises(InvalidArgument, match=f"Options.wire='{wire}' .*{message}"):
            selection.check_wire(facts)
        with pytest.raises(InvalidArgument, match=f"cannot quantise: .*{message}"):
            selection.choose(facts, "all_reduce", 1 << 20, algorithm=registry.algorithm_of(wire))
    facts = replace(facts, wire="int8")
    selection.check_wire(facts)
    assert selection.choose(facts, "all_reduce", 1 << 30).algorithm == "two_shot_int8"


def test_explain_says_why_a_group_does_not_quantise_a_call():
    facts = SelectionFacts("sm_90", 8, layout.plan(8, 64 << 20), 32, wire="fp8")

    def reason(nbytes: int, how: SelectionFacts = facts, collective: str = "all_reduce") -> str:
        return selection.choose(how, collective, nbytes, bits=16).reason.partition("; not quantised: ")[2]

    assert reason(1 << 19) == "wire='fp8' gains from 1048576 bytes on" and not reason(4 << 20)
    beside = replace(facts, beside=True)
    assert "two_shot_fp8 takes more than 128 registers" in reason(4 << 20, beside)
    assert selection.wire_from(beside) is None  # so that NCCL keeps its calls
    assert (
        reason(4 << 20, replace(facts, wire="fp8_gather", no_multicast="")) == "two_shot_fp8_gather is slower than NVLS"
    )
    assert not reason(1 << 20, collective="all_gather") and not reason(1 << 20, replace(facts, wire=""))


def test_quantised_calls_do_not_go_to_nccl_for_their_size():
    facts = backend_choice.GroupFacts("cuda", 8, 1, None, "nccl", wire="fp8")
    routes = [(torch.bfloat16, "sum", "kernels"), (torch.int32, "sum", "nccl"), (torch.bfloat16, "max", "nccl")]
    for dtype, op, backend in routes:
        assert backend_choice.decide(facts, "all_reduce", dtype, op, 1 << 30).backend == backend
    assert backend_choice.decide(facts, "reduce_scatter", torch.bfloat16, "sum", 1 << 30).backend == "nccl"
