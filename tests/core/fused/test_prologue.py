"""all_reduce_rows with a prologue: rows that a user's Triton function makes. The first one is the example in
docs/fused.md."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tests.explorer.compiled.ptx_mutants import changed, options
from tests.explorer.dependent import chains
from tests.explorer.mutation import Edit, loaded
from tests.marks import some
from tricomm.errors import CollectiveMismatch, InvalidArgument
from tricomm.explorer.campaign import smallest
from tricomm.kernels.collectives import registry
from tricomm.kernels.device.epilogue import nothing
from tricomm.kernels.device.rows import columns_at, values
from tricomm.kernels.launch import compiler
from tricomm.options import tuned


@triton.jit
def weighted(number, columns, inside, operands, SPEC: tl.constexpr):
    out, experts, index, weight, top_k = operands
    total = tl.zeros(columns.shape, tl.float32)
    for k in range(top_k):
        row = tl.load(index + number * top_k + k).to(tl.int64)
        part = tl.load(experts + row * SPEC.HIDDEN + columns, mask=inside, other=0).to(tl.float32)
        total += part * tl.load(weight + number * top_k + k)
    return total


@triton.jit
def split_k(number, columns, inside, operands, SPEC: tl.constexpr):
    out, parts, splits, rows = operands
    total = tl.zeros(columns.shape, tl.float32)
    for k in range(splits):
        total += tl.load(parts + (k * rows + number) * SPEC.HIDDEN + columns, mask=inside, other=0)
    return total


@triton.jit
def dequantized(number, columns, inside, operands, SPEC: tl.constexpr):
    out, codes, scale = operands
    code = tl.load(codes + number * SPEC.HIDDEN + columns, mask=inside, other=0)
    return code.to(tl.float32) * tl.load(scale + number)


@triton.jit
def biased(number, columns, inside, operands, SPEC: tl.constexpr):
    out, x, bias, factor = operands
    value = tl.load(x + number * SPEC.HIDDEN + columns, mask=inside, other=0).to(tl.float32) * factor
    return value + tl.load(bias + columns, mask=inside, other=0)


@triton.jit
def written(row, operands, SPEC: tl.constexpr):
    out = operands[0]
    for n in tl.static_range(SPEC.ROW_PLANES):
        for j in tl.static_range(SPEC.PACK):
            at, inside = columns_at(n, j, SPEC)
            value = values(row, n, j, SPEC).to(out.dtype.element_ty)
            tl.store(out + row.number * SPEC.HIDDEN + at, value, mask=inside)


def integers(rank, *shape, most=4, dtype=torch.float32):
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def weighted_case(rank, rows, hidden, dtype):
    """Two of seven expert rows for each row, in another order on each rank."""
    experts, weight = integers(rank, 7, hidden, dtype=dtype), integers(rank + 50, rows, 2)
    index = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(rank + n))[:2] for n in range(rows)])
    index = index.view(rows, 2).int()
    made = (experts.float()[index.long()] * weight[..., None]).sum(1)
    return made, (experts, index, weight, 2)


def split_k_case(rank, rows, hidden, dtype):
    """Sums that have more digits than 16 bits hold."""
    parts = integers(rank, 3, rows, hidden, most=1000)
    return parts.sum(0), (parts, 3, rows)


def dequantized_case(rank, rows, hidden, dtype):
    codes, scale = integers(rank, rows, hidden, most=100, dtype=torch.int8), 2.0 ** integers(rank, rows, 1)
    return codes.float() * scale, (codes, scale)


def biased_case(rank, rows, hidden, dtype):
    x, bias = integers(rank, rows, hidden, dtype=dtype), integers(rank + 9, hidden, most=300)
    return x.float() * 0.5 + bias, (x, bias, 0.5)


CASES = {weighted: weighted_case, split_k: split_k_case, dequantized: dequantized_case, biased: biased_case}
WAYS = [("one_shot", "ll"), ("two_shot", "ll"), ("one_shot", "ll128"), ("two_shot", "ll128")]
SMALL = tuned(smallest(2), blocks=2, tile=32)


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def called(comm, f, rows, hidden, dtype, way=(None, None)):
    """A call with `f`, of poisoned x and out: its result, and what f gives, rounded."""
    made, operands = CASES[f](comm.rank, rows, hidden, dtype)
    x, out = torch.full((rows, hidden), torch.nan, dtype=dtype), torch.full((rows, hidden), 77, dtype=dtype)
    comm.all_reduce_rows(x, written, out, *operands, prologue=f, algorithm=way[0], protocol=way[1])
    assert x.isnan().all()
    return out, made.to(dtype)


@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("dtype", "rows", "hidden", "world_size"),
    some(
        [(torch.bfloat16, 5, 264, 3), (torch.float16, 3, 8, 8), (torch.float32, 7, 200, 2), (torch.bfloat16, 1, 56, 4)],
        4,
    ),
)
def test_the_bits_are_those_of_the_function_and_then_the_call(f, dtype, rows, hidden, world_size):
    def body(comm):
        results = [called(comm, f, rows, hidden, dtype, way) for way in WAYS]
        total = comm.all_reduce(results[0][1].clone())
        assert all(same(out, total) for out, _ in results)
        return results[0][0]

    memory = SMALL.arena_bytes * (4 if world_size > 3 else 1)
    large = tricomm.simulate(body, world_size)
    small = tricomm.simulate(body, world_size, options=replace(SMALL, arena_bytes=memory))  # several chunks and tiles
    exact = torch.zeros(rows, hidden)
    for rank in range(world_size):
        exact += CASES[f](rank, rows, hidden, dtype)[0].to(dtype).float()
    assert all(same(out, exact.to(dtype)) for out in (*large, *small))


def test_the_example_in_the_document_is_the_function_tested_here():
    example = Path("docs/fused.md").read_text().split("```python\n@triton.jit\n")[2].split("```")[0]
    assert example.strip() in Path(__file__).read_text()


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    def body(comm):
        x, out = integers(comm.rank, 2, 40).half(), torch.zeros(2, 40)
        for asked, why in (
            (
                lambda: comm.all_reduce_rows(x, written, out, prologue=print),
                "prologue is no plain @triton.jit function",
            ),
            (
                lambda: comm.all_reduce_rows(x, written, out, prologue=0),
                "prologue is no plain @triton.jit function: int",
            ),
            (
                lambda: comm.all_reduce_rows(x, written, out, prologue=written),
                "prologue takes 3 arguments, it is called with 5",
            ),
            (lambda: comm.all_reduce_rows(x, biased, out), "epilogue takes 5 arguments, it is called with 3"),
            (lambda: comm.all_reduce_rows(x, written, out, prepare=biased), "prepare takes 5 arguments"),
            (lambda: comm.all_reduce_rows(x, written, out, prepare=x), "prepare is no plain @triton.jit function"),
            (lambda: comm.all_reduce_rows(x, written, out, x.t(), prologue=biased), "operand 1 is not contiguous"),
            (lambda: comm.all_reduce_rows(x, written, out, None, prologue=biased), "tensors and numbers fit"),
            (lambda: comm.all_reduce_rows(x.int(), written, out, prologue=biased), "fp16, bf16 or fp32"),
            (lambda: comm.all_reduce_rows(out[:, :36].half(), written, out, prologue=negated), "multiples of 8"),
            (lambda: comm.all_reduce_rows(x, written, out, prologue=negated, protocol="simple"), "no fused simple"),
        ):
            with pytest.raises(InvalidArgument, match=re.escape(why)):
                asked()
        empty = torch.empty(0, 40)
        assert comm.all_reduce_rows(empty, written, empty, prologue=negated) is None
        return comm.all_reduce(torch.ones(3)).sum()

    assert tricomm.simulate(body, 2) == [6.0, 6.0]


@triton.jit
def negated(number, columns, inside, operands, SPEC: tl.constexpr):
    return -tl.load(operands[1] + number * SPEC.HIDDEN + columns, mask=inside, other=0)


@pytest.mark.parametrize("others", [None, negated])
def test_ranks_with_different_prologues_are_told(others):
    def body(comm):
        x, out = integers(comm.rank, 2, 40), torch.zeros(2, 40)
        prologue = others if comm.rank else biased
        with pytest.raises(CollectiveMismatch, match="biased"):
            comm.all_reduce_rows(x, written, out, x, x[0], 1.0, prologue=prologue)

    tricomm.simulate(body, 2)


def compiled_for(prologue, algorithm="one_shot", bits=16, operands=("*bf16:16", "*fp32:16", "i64", "i64"), **more):
    values = {"WORLD_SIZE": 2, "BLOCK": 64, "LANES": 32, "PTX": True, "LL": True, "DEPENDENT": True, "num_warps": 1}
    values |= {"ELEMENT": "bfloat16", "OP": "sum", "HIDDEN": 512, "ALIGNED": True, "EPILOGUE": written}
    values |= {"PREPARE": nothing, "PROLOGUE": prologue, "OPERANDS": operands}
    kernel = registry.find("all_reduce_rows", algorithm, "ll")
    text: str = compiler.compile_kernel(kernel.function, values | more, bits, True, 90).asm["ptx"]
    return text


def test_the_function_reads_after_the_wait_for_earlier_kernels_and_in_words_of_16_bytes():
    text = compiled_for(split_k)
    before, after = text.split("griddepcontrol.wait", 1)
    assert not re.search(r"\b(ld|st)\.\S*global", before)
    assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", after)


def calls(comm, way):
    """Rows of several tiles and blocks, in several chunks, by two prologues."""
    for f, rows, hidden in ((weighted, 3, 200), (biased, 5, 24)):
        out, made = called(comm, f, rows, hidden, torch.float32, way)
        others = [CASES[f](rank, rows, hidden, torch.float32)[0] for rank in range(2)]
        if not torch.equal(out, others[0] + others[1]):
            raise AssertionError("wrong sums")


ROWS, ONE_SHOT, TWO_SHOT = (
    f"kernels/{name}.py"
    for name in ("device/rows", "collectives/all_reduce_rows_one_shot", "collectives/all_reduce_rows_two_shot")
)
MUTANTS = {
    "the function is not asked": (ROWS, "if SPEC.PROLOGUE is None:", "if True:"),
    "a row is read past its end": (
        ROWS,
        "inside = lane < tl.multiple_of(",
        "inside = lane < SPEC.TILE + tl.multiple_of(",
    ),
    "a word's elements lie over each other": (ROWS, "<< (lane % SPEC.PACK * SPEC.BITS)", "<< 0"),
    "a block's later rows are those of the chunk's first": (
        ONE_SHOT,
        "own_row(tensors[0], tensors[3], first + this, SPEC)",
        "own_row(tensors[0], tensors[3], first, SPEC)",
    ),
    "a shard is made of the columns of another one": (
        TWO_SHOT,
        "start, left = _of_shard(_ahead(me, ahead, SPEC), k, SPEC)\n            tiles",
        "start, left = _of_shard(_ahead(me, ahead + 1, SPEC), k, SPEC)\n            tiles",
    ),
}


def explored(way, edits, schedules=2):
    with loaded(edits):
        return tricomm.check(lambda comm: calls(comm, way), 2, schedules=schedules, options=SMALL)


@pytest.mark.parametrize("name", some(MUTANTS, 5))
def test_the_explorer_notices_each_mistake(name):
    file, old, new = MUTANTS[name]
    assert not explored(WAYS[file == TWO_SHOT], (Edit(file, old, new),)).ok


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_the_explorer_has_no_finding(way):
    assert explored(way, (), 8).ok


@pytest.mark.exhaustive
def test_compiled_kernels_have_no_finding_and_the_same_bits():
    def body(comm):
        return [called(comm, f, 2, 48, torch.bfloat16, way)[0] for f in CASES for way in WAYS[:2]]

    plain = tricomm.simulate(body, 2)
    compiled = tricomm.simulate(body, 2, compiled="sm_90")
    assert all(map(same, plain[0], compiled[0]))
    assert tricomm.check(body, 2, schedules=2, compiled="sm_90").ok


def after_another(comm):
    """The operand is the result of the kernel before."""
    _, (parts, splits, rows) = split_k_case(comm.rank, 1, 48, torch.bfloat16)
    comm.all_reduce(parts, algorithm="one_shot", protocol="ll")
    x = torch.empty(1, 48, dtype=torch.bfloat16)
    out = torch.zeros(1, 48)
    comm.all_reduce_rows(x, written, out, parts, splits, rows, prologue=split_k, algorithm="one_shot", protocol="ll")
    return out


@pytest.mark.exhaustive
def test_without_the_wait_for_earlier_kernels_the_function_reads_too_early():
    def report():
        return tricomm.check(after_another, 2, 4, options=options(2), compiled="sm_90")

    assert report().ok
    with changed("no wait", chains.without_wait, "all_reduce_rows_one_shot"):
        assert "no_wait" in {finding.kind for finding in report().findings}


def test_no_access_has_more_than_the_four_elements_at_which_shards_of_fp32_begin():
    """Of narrower operands neither: a wider access would be misaligned, and read past the end of a row."""
    more = {"ELEMENT": "float32", "SHARDS": 2, "HIDDEN": 1000, "BLOCK": 256}
    text = compiled_for(dequantized, "two_shot", 32, ("*bf16:16", "*i8:16", "*fp32"), **more)
    codes = re.findall(r"\bld\.global\.(\S+)", text)
    assert "b32" in codes and not {"v2.b32", "v4.b32", "b64", "v2.b64"} & set(codes), codes
