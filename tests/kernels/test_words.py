"""Elements and words: every dtype and op bit for bit against torch, every size and alignment exactly."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tricomm.kernels import interpreter, registry
from tricomm.kernels.words import load_words, reduce_words, store_words

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32]


@triton.jit
def _reduce(x_ptr, y_ptr, n: tl.int64, OP: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    parts = ()
    for r in tl.static_range(WORLD_SIZE):
        parts = parts + (load_words(x_ptr + r * n, 0, n, BLOCK, False),)
    store_words(y_ptr, 0, reduce_words(parts, x_ptr.dtype.element_ty, OP, WORLD_SIZE), n, BLOCK, False)


@triton.jit
def _copy(x_ptr, y_ptr, n: tl.int64, IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, n, BLOCK):
        store_words(y_ptr, first, load_words(x_ptr, first, n, BLOCK, IN), n, BLOCK, OUT)


def reduce(x: torch.Tensor, op: str) -> torch.Tensor:
    y = torch.full((x.shape[1],), -77, dtype=x.dtype)
    constexprs = {"OP": op, "WORLD_SIZE": x.shape[0], "BLOCK": 1024}
    interpreter.interpret(interpreter.programs(_reduce, (1,), (x.contiguous(), y, x.shape[1]), constexprs))
    return y


def in_rank_order(x: torch.Tensor, op: str) -> torch.Tensor:
    """The documented order and precision, in torch."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    total = wide[0].clone()
    for part in wide[1:]:
        if op in ("sum", "avg"):
            total = total + part
        elif op == "prod":
            total = total * part
        else:
            total = torch.minimum(total, part) if op == "min" else torch.maximum(total, part)
    if op == "avg":
        total = total / len(x) if x.is_floating_point() else torch.div(total, len(x), rounding_mode="trunc")
    return total.to(x.dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


@pytest.mark.parametrize("op", registry.OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
def test_floats_have_the_bits_of_the_documented_order(world_size, dtype, op):
    generator = torch.Generator().manual_seed(world_size)
    x = torch.randn(world_size, 1000, generator=generator, dtype=torch.float64)
    x[:, 900:950] *= 1e30
    x[:, 950:970] *= 1e-40
    for column, odd in enumerate([float("inf"), float("-inf"), float("nan"), 65504.0, 0.0]):
        x[column % world_size, 970 + column] = odd
    x = x.to(dtype)
    got, want = reduce(x, op), in_rank_order(x, op)
    agree = (bits(got) == bits(want)) | (got.isnan() & want.isnan())
    assert bool(agree.all()), (got[~agree][:4], want[~agree][:4])


@pytest.mark.parametrize("op", registry.OPS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap_and_their_average_truncates(dtype, op):
    extremes = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(extremes.min // 2, extremes.max // 2, (3, 997), generator=generator, dtype=dtype)
    x[:, 0], x[:, 1] = extremes.max, extremes.min
    x[:, 2] = torch.tensor([-1, -1, -5], dtype=dtype)
    assert torch.equal(reduce(x, op), in_rank_order(x, op))
    if op == "avg":
        assert int(reduce(x, op)[2]) == -2, "-7 / 3 truncates toward zero"


def test_the_order_matters_so_the_test_of_it_can_fail():
    x = torch.tensor([[1e8], [1.0], [-1e8]])
    assert float(reduce(x, "sum")) == 0.0
    assert float(reduce(x[[0, 2, 1]], "sum")) == 1.0


@settings(max_examples=120, deadline=None)
@given(
    count=st.integers(1, 300),
    source=st.integers(0, 9),
    target=st.integers(0, 9),
    dtype=st.sampled_from(FLOATS + INTEGERS),
    tile=st.sampled_from([2, 16, 64]),
)
def test_any_count_at_any_offset_is_copied_and_nothing_else_is_touched(count, source, target, dtype, tile):
    room = torch.randint(-100, 100, (count + 20,), generator=torch.Generator().manual_seed(count)).to(dtype)
    x = room[source : source + count]
    into = torch.full((count + 20,), 55, dtype=dtype)
    y = into[target : target + count]
    constexprs = {"IN": x.data_ptr() % 16 == 0, "OUT": y.data_ptr() % 16 == 0, "BLOCK": tile}
    interpreter.interpret(interpreter.programs(_copy, (1,), (x, y, count), constexprs))
    assert torch.equal(y, x)
    assert bool((into[:target] == 55).all()) and bool((into[target + count :] == 55).all())
