"""16-byte words with the flag inside: one access each, and refused without hardware or compiler support."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.explorer.wide_kernels import gather_sum
from tricomm.errors import InvalidArgument
from tricomm.kernels import wide_words
from tricomm.kernels.launch import interpreter
from tricomm.kernels.launch.kernel_launch import prepare
from tricomm.kernels.wide_words import load_wide, put_wide, store_wide, why_not

CPU = torch.device("cpu")


@triton.jit
def _copy(from_ptr, to_ptr, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    low, high = load_wide(from_ptr + 2 * lane)
    store_wide(to_ptr + 2 * lane, low, high, lane < count)


@triton.jit
def _put(to_ptr, x_ptr, flag, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    planes = (tl.load(x_ptr + lane), tl.load(x_ptr + BLOCK + lane), tl.load(x_ptr + 2 * BLOCK + lane))
    put_wide(to_ptr, planes, flag, count, BLOCK)


def test_a_wide_word_is_one_access_of_16_bytes():
    given, taken, seen = torch.arange(16), torch.full((16,), -1), []
    with interpreter.observe(lambda kind, addresses, itemsize: seen.append((kind, addresses.tolist(), itemsize))):
        prepare(_copy, 1, (given, taken, 5), {"BLOCK": 8}, CPU)()
    assert torch.equal(taken[:10], given[:10]) and (taken[10:] == -1).all()
    places = [[tensor.data_ptr() + 16 * n for n in range(count)] for tensor, count in ((given, 8), (taken, 5))]
    assert seen == [("load", places[0], 16), ("store", places[1], 16)]


def test_twelve_bytes_of_payload_and_the_flag():
    box, x, flag = torch.full((32,), -1), torch.randint(-(1 << 62), 1 << 62, (24,)), (1 << 32) - 3
    prepare(_put, 1, (box, x, flag, 7), {"BLOCK": 8}, CPU)()
    tile = box.view(2, 2, 4, 2).transpose(1, 2).reshape(2, 8, 2)  # even lanes first, then the odd ones
    assert torch.equal(tile[0, :7, 0], x[:7]) and torch.equal(tile[1, :7, 0], x[8:15])
    assert ((tile[:, :7, 1] >> 32) & 0xFFFFFFFF == flag).all()
    halves = tile[:, :7, 1] & 0xFFFFFFFF
    assert torch.equal(halves[0] | halves[1] << 32, x[16:23])
    assert (tile[:, 7] == -1).all()


def test_a_wide_word_that_is_not_aligned_is_refused():
    memory = torch.zeros(18, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match="multiple of 16"):
        prepare(_copy, 1, (memory[1:], memory, 5), {"BLOCK": 8}, CPU)()


def test_a_triton_or_a_gpu_without_wide_words_is_refused_by_name():
    assert why_not(75, "3.9.0") is None and why_not(100, "3.10.1") is None
    assert re.fullmatch(r"Triton 3\.8\.0 .*; Triton 3\.9 or newer works", why_not(90, "3.8.0"))
    assert re.fullmatch("sm_70 .*; sm_75 or newer works", why_not(70, "3.9.0"))


def _compiled(architecture: int, tile: int, warps: int):
    kinds = {"x_ptr": "*i64", "y_ptr": "*i64", "boxes": "*i64", "group": "*i64", "rank": "i32", "epoch": "i64"}
    constants = {"FORM": "wide", "WORLD_SIZE": 4, "BLOCK": tile, "PTX": True}
    kinds |= {"words": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(gather_sum, kinds, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps}).asm["ptx"]


@pytest.mark.skipif(why_not(90) is not None, reason="this Triton is refused")
@pytest.mark.parametrize(("architecture", "tile", "warps"), [(75, 32, 1), (80, 256, 4), (90, 128, 4), (100, 32, 1)])
def test_no_load_is_made_twice(architecture, tile, warps):
    ptx, each = _compiled(architecture, tile, warps), 2 * tile // (32 * warps)
    assert len(re.findall(r"ld\.relaxed\.sys\.global\.b128", ptx)) == 4 * each
    assert re.findall(r"st\.relaxed\.sys\.global\.b128", ptx)
    assert not re.findall(r"(?:ld|st)\.\S*\.sys\.\S*v2\.b64", ptx)


@pytest.mark.skipif(why_not(90) is None, reason="this Triton has wide words")
def test_an_older_triton_compiles_none():
    with pytest.raises(triton.CompilationError) as raised:
        _compiled(90, 128, 4)
    innermost: BaseException = raised.value
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    assert "wide words need Triton 3.9" in str(innermost)


def test_the_compile_time_check_is_the_same_as_the_named_one():
    assert wide_words.COMPILES.value == (why_not(90) is None)
