"""Reductions on the CPU have the bits that kernels/reference.py promises, into any of their inputs."""

import pytest
import torch

from tests.c10d.bodies.groups import same
from tricomm.arguments import DTYPES
from tricomm.c10d import dtype_emulation
from tricomm.c10d.dtype_emulation import check_reduction, reduce_into
from tricomm.errors import InvalidArgument
from tricomm.kernels.reference import reduced

TYPES = [dtype for dtype in DTYPES if not dtype.is_complex]
OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")


def some(dtype, count, generator):
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator) * 100).to(dtype)
    return torch.randint(-128 if dtype.is_signed else 0, 127, (count,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_operation_has_the_bits_of_the_reference(dtype, monkeypatch):
    monkeypatch.setattr(dtype_emulation, "_BLOCK", 1024)
    generator = torch.Generator().manual_seed(3)
    for op in OPS:
        try:
            check_reduction(op, dtype, "test")
        except InvalidArgument:
            continue
        for world_size, count in ((1, 5), (2, 2181), (3, 1032), (4, 17)):
            parts = [some(dtype, count, generator) for _ in range(world_size)]
            for target in range(-1, world_size):
                inputs = [part.clone() for part in parts]
                out = inputs[target] if target >= 0 else torch.empty_like(parts[0])
                reduce_into(op, inputs, out)
                assert same(out, reduced(op, parts)), (op, world_size, target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_minus_zero_is_less_than_zero_and_nan_propagates(dtype):
    a = torch.tensor([0.0, -0.0, 0.0, float("nan"), 1.0] * 20).to(dtype)
    b = torch.tensor([-0.0, 0.0, 0.0, 1.0, float("nan")] * 20).to(dtype)
    for op, signs in (("min", [True, True, False]), ("max", [False, False, False])):
        out = torch.empty_like(a)
        reduce_into(op, [a, b], out)
        assert torch.signbit(out.view(20, 5)[:, :3]).tolist() == [signs] * 20
        assert out.view(20, 5)[:, 3:].isnan().all()


@pytest.mark.parametrize("dtype, most", [(torch.uint16, 40000), (torch.uint32, 3 << 30), (torch.uint64, (1 << 63) + 8)])
def test_unsigned_types_that_torch_cannot_add(dtype, most):
    large, small = (torch.tensor([value], dtype=dtype) for value in (most, 4))
    bits = 8 * dtype.itemsize
    for op, parts, want in (
        ("sum", [large, large], 2 * most % (1 << bits)),
        ("max", [small, large], most),
        ("min", [large, small], 4),
        ("avg", [small, small], 4),
        ("prod", [small] * 3, 64),
        ("bxor", [large, small], most ^ 4),
    ):
        out = torch.empty_like(large)
        reduce_into(op, parts, out)
        assert int(out.numpy()[0]) == want, op


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_an_infinite_part_of_a_complex_number_does_not_change_the_other_part(dtype, op):
    parts = [torch.tensor([complex(float("inf"), 1), complex(2, 3)], dtype=dtype), torch.ones(2, dtype=dtype)]
    out = torch.empty(2, dtype=dtype)
    reduce_into(op, parts, out)
    assert out.imag.tolist() == ([1.0, 3.0] if op == "sum" else [0.5, 1.5]) and out.real[0] == float("inf")
    assert torch.equal(out, reduced(op, parts))


def test_an_operation_that_is_not_known_is_refused():
    with pytest.raises(InvalidArgument, match="premul_sum is not defined on the CPU; there is sum, "):
        reduce_into("premul_sum", [torch.ones(2), torch.ones(2)], torch.empty(2))


def test_unsigned_floats_are_not_treated_as_unsigned_integers():
    parts = [torch.tensor([1.0, 4.0, 0.5]).to(torch.float8_e8m0fnu) for _ in range(2)]
    for op, want in (("sum", [2.0, 8.0, 1.0]), ("max", [1.0, 4.0, 0.5]), ("prod", [1.0, 16.0, 0.25])):
        out = torch.empty_like(parts[0])
        reduce_into(op, parts, out)
        assert out.float().tolist() == want
