"""Elements and words: every dtype and op bit for bit against torch, every size and alignment exactly."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tricomm.errors import InvalidArgument
from tricomm.kernels import dtypes
from tricomm.kernels.device.packing import load_words, store_words
from tricomm.kernels.launch import interpreter
from tricomm.kernels.reduction import accumulate, combine, finish, reduce_words
from tricomm.kernels.specialization import Specialization

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
RAW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ARITHMETIC, BITWISE = dtypes.OPS[:5], dtypes.OPS[5:]


@triton.jit
def _reduce(x_ptr, y_ptr, n: tl.int64, SPEC: tl.constexpr):
    parts = ()
    for r in tl.static_range(SPEC.WORLD_SIZE):
        parts = parts + (load_words(x_ptr + r * n, 0, n, SPEC.BLOCK, False),)
    store_words(y_ptr, 0, reduce_words(parts, SPEC), n, SPEC.BLOCK, False)


@triton.jit
def _halves(x_ptr, y_ptr, n: tl.int64, SPEC: tl.constexpr):
    """Four rows as two partial sums of two, put together."""
    some = (load_words(x_ptr, 0, n, SPEC.BLOCK, False), load_words(x_ptr + n, 0, n, SPEC.BLOCK, False))
    others = (load_words(x_ptr + 2 * n, 0, n, SPEC.BLOCK, False), load_words(x_ptr + 3 * n, 0, n, SPEC.BLOCK, False))
    total = combine(accumulate(some, 2, SPEC), accumulate(others, 2, SPEC), SPEC)
    store_words(y_ptr, 0, finish(total, SPEC), n, SPEC.BLOCK, False)


@triton.jit
def _copy(x_ptr, y_ptr, n: tl.int64, IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, n, BLOCK):
        store_words(y_ptr, first, load_words(x_ptr, first, n, BLOCK, IN), n, BLOCK, OUT)


def reduce(x: torch.Tensor, op: str, kernel=_reduce) -> torch.Tensor:
    y = bits(torch.zeros(x.shape[1], dtype=x.dtype)).fill_(-77)
    element, operation = dtypes.reduction(dtypes.DTYPES[str(x.dtype).removeprefix("torch.")], op)
    tile = triton.next_power_of_2(x.shape[1])
    spec = Specialization(x.shape[0], tile, LANES=16, PTX=False, ELEMENT=element, OP=operation)
    args = (bits(x).contiguous(), y, x.shape[1])
    interpreter.interpret(interpreter.programs(kernel, (1,), args, {"SPEC": spec}))
    return y.view(x.dtype)


def in_rank_order(x: torch.Tensor, op: str, rows: int | None = None) -> torch.Tensor:
    """The documented order and precision, in torch."""
    small = x.itemsize < 4
    wide = (x.float() if x.is_floating_point() else x.int()) if small else x
    return rounded(total_of(wide, op), op, rows or len(x), x.dtype)


def total_of(wide: torch.Tensor, op: str) -> torch.Tensor:
    total = wide[0].clone()
    for part in wide[1:]:
        if op in ("sum", "avg"):
            total = total + part
        elif op == "prod":
            total = total * part
        elif op in BITWISE:
            total = {"band": total & part, "bor": total | part, "bxor": total ^ part}[op]
        else:
            total = {"min": smaller, "max": larger}[op](total, part)
    return total


def smaller(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch's minimum, where -0 is less than +0."""
    result = torch.minimum(a, b)
    if not a.is_floating_point():
        return result
    return torch.where((result == 0) & (torch.signbit(a) | torch.signbit(b)), -result.abs(), result)


def larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return -smaller(-a, -b) if a.is_floating_point() else torch.maximum(a, b)


def rounded(total: torch.Tensor, op: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
    if op == "avg":
        total = total / rows if total.is_floating_point() else torch.div(total, rows, rounding_mode="trunc")
    if dtype == torch.float8_e4m3fn:  # which older versions of torch convert differently
        total = total.clamp(-448, 448)
    return total.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(RAW[x.itemsize])


def specials(world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of every magnitude; the last columns have special floats, each on every rank in turn."""
    generator = torch.Generator().manual_seed(world_size)
    x = torch.randn(world_size, 1000, generator=generator, dtype=torch.float64)
    x[:, 800:900] *= 100
    x[:, 900:950] *= 1e30
    x[:, 950:970] *= 1e-40
    x[:, 970:975] *= 2.0**-15
    for column, odd in enumerate([float("inf"), float("-inf"), float("nan"), 65504.0, 464.0, 0.0]):
        x[column % world_size, 980 + column] = odd
    x[:, 990], x[:, 991], x[:, 992] = 0.0, -0.0, float("inf")
    x[0, 992], x[0, 990] = float("-inf"), -0.0
    return x.to(dtype)


def agree(got: torch.Tensor, want: torch.Tensor) -> None:
    same = bits(got) == bits(want)
    if got.is_floating_point():
        same |= got.float().isnan() & want.float().isnan()
    assert bool(same.all()), (got[~same][:4], want[~same][:4], same.logical_not().nonzero()[:4])


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("world_size", [1, 3, 8, *[pytest.param(n, marks=pytest.mark.soak) for n in (2, 7)]])
def test_floats_have_the_bits_of_the_documented_order(world_size, dtype, op):
    x = specials(world_size, dtype)
    agree(reduce(x, op), in_rank_order(x, op))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_of_both_signs_have_an_order(dtype):
    x = torch.tensor([[0.0, -0.0, -0.0, 0.0], [-0.0, 0.0, -0.0, 0.0]]).to(dtype)
    assert torch.signbit(reduce(x, "max").float()).tolist() == [False, False, True, False]
    assert torch.signbit(reduce(x, "min").float()).tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_code_of_fp8_and_every_rounding_between_two(dtype):
    """Sums of two codes: every code and all values between two codes, as torch converts fp32."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(dtype)
    for first in range(0, 256, 32):
        left = codes[first : first + 32].view(torch.int8).repeat_interleave(256).view(dtype)
        right = codes.view(torch.int8).repeat(32).view(dtype)
        x = torch.stack([left.view(torch.int8), right.view(torch.int8)]).view(dtype)
        agree(reduce(x, "sum"), in_rank_order(x, "sum"))


@pytest.mark.parametrize("op", dtypes.OPS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap_and_their_average_truncates(dtype, op):
    extremes = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(extremes.min // 2, extremes.max // 2, (3, 997), generator=generator, dtype=dtype)
    x[:, 0], x[:, 1] = extremes.max, extremes.min
    x[:, 2] = torch.tensor([-1, -1, -5]).to(dtype)
    agree(reduce(x, op), in_rank_order(x, op))
    if op == "avg" and dtype != torch.uint8:
        assert int(reduce(x, op)[2]) == -2, "-7 / 3 truncates toward zero"


@pytest.mark.parametrize("op", dtypes.DTYPES["bool"].ops)
def test_bools_are_true_or_false(op):
    x = torch.tensor([[False, False, True, True], [False, True, False, True]])
    either, both = [False, True, True, True], [False, False, False, True]
    wanted = {"sum": either, "max": either, "bor": either, "prod": both, "min": both, "band": both}
    assert reduce(x, op).tolist() == wanted.get(op, [False, True, True, False])


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("op", ARITHMETIC)
def test_two_partial_results_make_the_whole(dtype, op):
    x = (
        specials(4, dtype)
        if dtype.is_floating_point
        else specials(4, torch.float64).nan_to_num().clamp(-9, 9).to(dtype)
    )
    small = dtype.itemsize < 4
    wide = (x.float() if x.is_floating_point() else x.int()) if small else x
    halves = torch.stack([total_of(wide[:2], op), total_of(wide[2:], op)])
    agree(reduce(x, op, _halves), rounded(total_of(halves, op), op, 4, dtype))
    agree(reduce(x[[2, 3, 0, 1]], op, _halves), reduce(x, op, _halves))


@pytest.mark.parametrize("op", BITWISE)
def test_two_partial_results_of_bits_make_the_whole(op):
    x = torch.randint(-128, 128, (4, 77), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    agree(reduce(x, op, _halves), total_of(x, op))


@pytest.mark.parametrize("name, op", [("float32", "band"), ("bool", "avg"), ("complex64", "max"), ("int8", "nand")])
def test_an_undefined_operation_is_refused_with_a_list_of_operations(name, op):
    with pytest.raises(InvalidArgument, match=f"op '{op}' is not defined for {name}; there is sum"):
        dtypes.reduction(dtypes.DTYPES[name], op)


def test_the_order_matters_so_the_test_of_it_can_fail():
    x = torch.tensor([[1e8], [1.0], [-1e8]])
    assert float(reduce(x, "sum")) == 0.0
    assert float(reduce(x[[0, 2, 1]], "sum")) == 1.0


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 150),
    source=st.integers(0, 9),
    target=st.integers(0, 9),
    dtype=st.sampled_from(FLOATS + INTEGERS),
    tile=st.sampled_from([2, 16, 64]),
)
def test_any_count_at_any_offset_is_copied_and_nothing_else_is_touched(count, source, target, dtype, tile):
    room = bits(torch.randint(-100, 100, (count + 20,), generator=torch.Generator().manual_seed(count)).to(dtype))
    x = room[source : source + count]
    into = bits(torch.full((count + 20,), 55, dtype=torch.float64).to(dtype))
    before = into.clone()
    y = into[target : target + count]
    constexprs = {"IN": x.data_ptr() % 16 == 0, "OUT": y.data_ptr() % 16 == 0, "BLOCK": tile}
    interpreter.interpret(interpreter.programs(_copy, (1,), (x, y, count), constexprs))
    assert torch.equal(y, x)
    assert torch.equal(into[:target], before[:target]) and torch.equal(into[target + count :], before[target + count :])
