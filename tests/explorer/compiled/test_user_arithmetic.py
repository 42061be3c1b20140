"""Users' kernels of every type: arithmetic, selection, conversion and functions, executed, beside torch."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from tests.explorer.compiled import bits
from tests.marks import some
from tricomm import simulate

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
COUNT = 512  # four a thread: halves come in pairs


@triton.jit
def _of_floats(x_ptr, y_ptr, z_ptr, out_ptr, COUNT: tl.constexpr, RESULTS: tl.constexpr):
    i = tl.arange(0, COUNT)
    x, y, z = tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)
    made = (tl.abs(x), -x, x + y, x - y, x * y, tl.where(x < y, x, z), tl.where((x != y) & (y >= z), y, x))
    made = made + (tl.minimum(x, y), tl.maximum(x, y), tl.maximum(x, 0.0).to(x.dtype))
    made = made + (tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL),)
    made = made + (tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL),)
    made = made + (tl.clamp(x, tl.minimum(y, 1.0).to(x.dtype), tl.maximum(y, 1.0).to(x.dtype)),)
    for n in tl.static_range(RESULTS):
        tl.store(out_ptr + n * COUNT + i, made[n])


def _least(x, y):
    """`torch.fmin` gives NaN for one that signals."""
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y)))


def _most(x, y):
    return -_least(-x, -y)


def _torch_of_floats(x, y, z):
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    made = [x.abs(), -x, x + y, x - y, x * y, torch.where(x < y, x, z), torch.where((x != y) & (y >= z), y, x)]
    made += [_least(x, y), _most(x, y), _most(x, zero), torch.minimum(x, y), torch.maximum(x, y)]
    return [*made, _least(_most(x, _least(y, one)), _most(y, one))]


@triton.jit
def _of_integers(x_ptr, y_ptr, z_ptr, out_ptr, COUNT: tl.constexpr, RESULTS: tl.constexpr):
    i = tl.arange(0, COUNT)
    x, y, z = tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)
    made = (tl.abs(x), -x, x + y, x - y, x * y, tl.where(x < y, x, z), tl.minimum(x, y), tl.maximum(x, y))
    made = made + (x & y, x | y, x ^ y, ~x, x << (z & 7), x >> (z & 7))
    for n in tl.static_range(RESULTS):
        tl.store(out_ptr + n * COUNT + i, made[n])


def _torch_of_integers(x, y, z):
    made = [x.abs(), -x, x + y, x - y, x * y, torch.where(x < y, x, z), torch.minimum(x, y), torch.maximum(x, y)]
    return [*made, x & y, x | y, x ^ y, ~x, x << (z & 7), x >> (z & 7)]


def _of_three(kernel, expected, dtype, architecture):
    given = [bits.special(dtype, COUNT, seed) for seed in range(3)]
    wanted = torch.stack(expected(*given))

    def body(comm):
        out = torch.zeros_like(wanted)
        comm.launch(kernel, 1, *given, out, COUNT=COUNT, RESULTS=len(wanted), num_warps=4, enable_fp_fusion=False)
        return out

    (result,) = simulate(body, 1, compiled=architecture)
    apart = result != wanted
    if dtype.is_floating_point:  # the sign of a zero and the bits of a NaN: tests/explorer/ptx/arithmetic
        apart &= ~(result.isnan() & wanted.isnan())
    assert not apart.any(), [(n, result[n, k], wanted[n, k], [g[k] for g in given]) for n, k in apart.nonzero()[:4]]


def _quick(number, value):
    return value in (("sm_90", torch.bfloat16), ("sm_80", torch.float16), ("sm_100", torch.int8))


@pytest.mark.parametrize(("architecture", "dtype"), some(itertools.product(ARCHITECTURES, FLOATS + INTEGERS), _quick))
def test_arithmetic_is_torchs(architecture, dtype):
    if dtype.is_floating_point:
        _of_three(_of_floats, _torch_of_floats, dtype, architecture)
    else:
        _of_three(_of_integers, _torch_of_integers, dtype, architecture)


@triton.jit
def _converted(x_ptr, outs, COUNT: tl.constexpr, RESULTS: tl.constexpr):
    i = tl.arange(0, COUNT)
    x = tl.load(x_ptr + i)
    for n in tl.static_range(RESULTS):
        tl.store(outs[n] + i, x.to(outs[n].dtype.element_ty))


_CONVERTED = [  # no e4m3 on sm_80
    pair for pair in itertools.product(ARCHITECTURES, FLOATS + INTEGERS + NARROW) if pair != ("sm_80", NARROW[0])
]


@pytest.mark.parametrize(("architecture", "dtype"), some(_CONVERTED, 11))
def test_conversions_are_torchs(architecture, dtype):
    """Of numbers that the other type has room for, to every one of them."""
    x = bits.special(dtype, COUNT, 0)
    if dtype.is_floating_point:
        x = torch.where(x.float().abs() < 100, x.float(), 7.25).to(dtype)
    if dtype in NARROW:
        targets = list(FLOATS[:3])  # Triton has no other conversions
    else:
        targets = [*FLOATS, *INTEGERS, *(NARROW if dtype in FLOATS[:3] else ())]
    targets = [t for t in targets if t != dtype and (architecture, t) != ("sm_80", NARROW[0])]
    if triton.__version__ < "3.9":  # their own code for e5m2 rounds ties up (3.6), and bf16 of sm_80 towards zero
        targets = [t for t in targets if t != NARROW[1]]
    kept = x.abs() if dtype.is_floating_point and dtype not in NARROW else x  # of a negative number u8 has none
    wanted = [kept.to(t) for t in targets]

    def body(comm):
        outs = tuple(torch.zeros(COUNT, dtype=t) for t in targets)
        comm.launch(_converted, 1, kept, outs, COUNT=COUNT, RESULTS=len(outs), num_warps=4)
        return outs

    (result,) = simulate(body, 1, compiled=architecture)
    for ours, theirs in zip(result, wanted, strict=True):
        same = (ours.double() == theirs.double()) | (ours.double().isnan() & theirs.double().isnan())
        assert same.all(), (ours.dtype, kept[~same][:4], ours[~same][:4], theirs[~same][:4])


@triton.jit
def _functions(x_ptr, out_ptr, COUNT: tl.constexpr, RESULTS: tl.constexpr, SINES: tl.constexpr):
    i = tl.arange(0, COUNT)
    x = tl.load(x_ptr + i)
    size = tl.abs(x)
    made = (tl.exp(x), tl.exp2(x), tl.log(size), tl.log2(size), tl.sqrt(size), tl.rsqrt(size))
    made = made + (tl.floor(x), tl.ceil(x), tl.erf(x), tl.sigmoid(x), 1.5 / x, tl.fma(x, x, x))
    if SINES:
        made = made + (tl.sin(x), tl.cos(x))
    for n in tl.static_range(RESULTS):
        tl.store(out_ptr + n * COUNT + i, made[n])


def _torch_functions(x):
    size = x.abs()
    made = [x.exp(), x.exp2(), size.log(), size.log2(), size.sqrt(), size.rsqrt()]
    return [*made, x.floor(), x.ceil(), x.erf(), x.sigmoid(), 1.5 / x, x * x + x, x.sin(), x.cos()]


@pytest.mark.parametrize(
    ("architecture", "dtype"), some(itertools.product(ARCHITECTURES, (torch.float32, torch.float64)), 6)
)
def test_functions_are_torchs_but_for_the_last_bits(architecture, dtype):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(COUNT, generator=generator, dtype=torch.float64).to(dtype) * 20
    x[:6] = torch.tensor([0.5, 1.0, -3.0, 60.0, 1e-30, -70.0])
    sines = dtype == torch.float32  # those of doubles call a function of PTX, which is refused by name
    wanted = torch.stack(_torch_functions(x.double())[: None if sines else -2])

    def body(comm):
        out = torch.zeros(len(wanted), COUNT, dtype=dtype)
        comm.launch(_functions, 1, x, out, COUNT=COUNT, RESULTS=len(wanted), SINES=sines, num_warps=4)
        return out

    (result,) = simulate(body, 1, compiled=architecture)
    error = (result.double() - wanted).abs() / wanted.abs().clamp(min=1e-3 if dtype == torch.float32 else 1e-9)
    worst = error.amax(1)
    assert (worst < (2e-5 if dtype == torch.float32 else 1e-13)).all(), worst
