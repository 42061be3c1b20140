"""Offsets beyond 2^31, in elements and in words: memory that is reserved and never filled, and the kernels' source."""

import ast
import mmap
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.arenas import DATA_KERNELS
from tricomm import kernels
from tricomm.kernels.device.packing import load_words, store_words
from tricomm.kernels.launch import interpreter

ROOM = Path(kernels.__path__[0])
MAP_NORESERVE = 0x4000  # which Python's mmap does not name before 3.13
BEYOND = (1 << 31) + 16  # words, or elements of a type of 8 bytes


@triton.jit
def _copy_from(x_ptr, y_ptr, n: tl.int64, first: tl.int64, tiles, BLOCK: tl.constexpr):
    for tile in range(tiles):
        at = first + (tl.program_id(0).to(tl.int64) + tile) * BLOCK
        store_words(y_ptr, at, load_words(x_ptr, at, n, BLOCK, False), n, BLOCK, False)


def reserved(nbytes: int) -> torch.Tensor:
    """Zeros; only pages that are written take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_words_beyond_2_to_the_31_are_copied(dtype):
    """64-bit words: for int8 this is element 2^34 + 128."""
    tail = 75 // dtype.itemsize
    elements = BEYOND * 8 // dtype.itemsize + tail
    x, y = (reserved(8 * BEYOND + 4096).view(dtype)[:elements] for _ in range(2))
    values = (torch.arange(tail) % 7 + 1).to(dtype)
    x[-tail:] = values
    raw = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    arguments = (x.view(raw), y.view(raw), elements, BEYOND, 3)
    interpreter.interpret(interpreter.programs(_copy_from, (1,), arguments, {"BLOCK": 4}))
    assert torch.equal(y[-tail:], values)
    assert not y[:64].to(torch.float32).any(), "an offset that is cut to 32 bits writes at the beginning"


@pytest.mark.parametrize("kernel", DATA_KERNELS, ids=lambda k: k.name)
def test_counts_and_sequence_numbers_have_64_bits(kernel):
    given = {p.name: p.annotation for p in kernel.function.params}
    assert given["numel"] == given["call"] == "i64", given


def narrow(source: str) -> list[int]:
    """Lines on which a block's number is multiplied before it is widened."""
    results = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side in (node.left, node.right):
                if isinstance(side, ast.Call) and ast.unparse(side.func) in ("tl.program_id", "tl.num_programs"):
                    results.append(node.lineno)
    return results


def test_a_blocks_number_is_widened_before_it_is_multiplied():
    """Except for the stride of a loop, both factors of which are at most 2^20."""
    wrong = {}
    for file in ROOM.rglob("*.py"):
        source = file.read_text()
        lines = [n for n in narrow(source) if "tl.num_programs(0) * SPEC." not in source.splitlines()[n - 1]]
        if lines:
            wrong[file.name] = lines
    assert wrong == {}


def test_a_narrow_product_is_found():
    assert narrow("at = tl.program_id(0) * BLOCK + 1") == [1]
    assert narrow("at = tl.program_id(0).to(tl.int64) * BLOCK") == []
