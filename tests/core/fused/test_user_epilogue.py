"""all_reduce_rows with a user's Triton function as epilogue. The first one is the example in docs/fused.md."""

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tests.marks import compiles
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.device.rows import columns_at, values


@triton.jit
def scaled_relu(row, operands, SPEC: tl.constexpr):
    out, bias, scale = operands
    for n in tl.static_range(SPEC.ROW_PLANES):
        for j in tl.static_range(SPEC.PACK):
            at, inside = columns_at(n, j, SPEC)
            value = values(row, n, j, SPEC) + tl.load(bias + at, mask=inside, other=0).to(tl.float32)
            value = tl.maximum(value * scale, 0.0).to(out.dtype.element_ty)
            tl.store(out + row.number * SPEC.HIDDEN + at, value, mask=inside)


@triton.jit
def prepared_bias(number, operands, SPEC: tl.constexpr):
    at, inside = columns_at(0, 0, SPEC)
    return tl.load(operands[1] + at, mask=inside, other=0)


@triton.jit
def first_of_a_word(row, operands, SPEC: tl.constexpr):
    at, inside = columns_at(0, 0, SPEC)
    tl.store(operands[0] + row.number * SPEC.HIDDEN + at, values(row, 0, 0, SPEC) + row.prepared, mask=inside)


def numbers(rank, rows=5, hidden=40, dtype=torch.bfloat16):
    return torch.randint(-4, 5, (rows, hidden), generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("compiled", [None, pytest.param("sm_90", marks=pytest.mark.exhaustive)])
def test_each_row_goes_through_the_function(compiled):
    bias = torch.arange(40) - 20.0
    wide = compiled is None or compiles(registry.find("all_reduce", "two_shot", "ll128"))
    ways = ("one_shot", "ll"), ("two_shot", "ll128" if wide else "ll")

    def body(comm):
        results = []
        for algorithm, protocol in ways:
            x, out = numbers(comm.rank), torch.full((5, 40), 9.0, dtype=torch.float16)
            comm.all_reduce_rows(x, scaled_relu, out, bias, 0.5, algorithm=algorithm, protocol=protocol)
            assert torch.equal(x, numbers(comm.rank))
            results.append(out)
        return results

    exact = ((numbers(0).float() + numbers(1).float() + bias) * 0.5).clamp(min=0).half()
    for results in tricomm.simulate(body, 2, compiled=compiled):
        assert all(torch.equal(out, exact) for out in results)


def test_operands_may_be_loaded_before_the_row_is_there():
    def body(comm):
        out = torch.zeros(3, 16)
        bias = torch.arange(16.0)
        comm.all_reduce_rows(numbers(comm.rank, 3, 16), first_of_a_word, out, bias, prepare=prepared_bias)
        return out

    exact = (numbers(0, 3, 16) + numbers(1, 3, 16)).float() + torch.arange(16.0)
    for out in tricomm.simulate(body, 2):
        assert torch.equal(out[:, ::4], exact[:, ::4]) and not out[:, 1::4].any()


def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent():
    def body(comm):
        x = numbers(comm.rank)
        for asked, why in (
            (lambda: comm.all_reduce_rows(x, print), "no plain @triton.jit function"),
            (lambda: comm.all_reduce_rows(x[:, :39].contiguous(), first_of_a_word), "multiples of 8 up to 16384"),
            (lambda: comm.all_reduce_rows(x, scaled_relu, x.t()), "operand 0 is not contiguous"),
            (lambda: comm.all_reduce_rows(x, scaled_relu, "a"), "tensors and numbers fit"),
            (lambda: comm.all_reduce_rows(x.double(), scaled_relu), "fp16, bf16 or fp32"),
            (lambda: comm.all_reduce_rows(x, first_of_a_word, protocol="simple"), "no fused simple kernel"),
        ):
            with pytest.raises(InvalidArgument, match=re.escape(why)):
                asked()
        return comm.all_reduce(torch.ones(3)).sum()

    assert tricomm.simulate(body, 2) == [6.0, 6.0]


def test_the_example_in_the_document_is_the_function_tested_here():
    page = Path("docs/fused.md").read_text()
    source = Path(__file__).read_text()
    example = page.split("```python\n@triton.jit\n")[1].split("```")[0]
    assert example.strip() in source
