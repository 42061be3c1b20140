"""`mma.sync` against the fragments that the PTX ISA prescribes, and against what Triton makes of `tl.dot`."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tests.explorer.ptx.execution.handwritten import kernel, run

SHAPES = [("f16", 8), ("f16", 16), ("bf16", 8), ("bf16", 16), ("tf32", 4), ("tf32", 8), ("e4m3", 16), ("e4m3", 32)]
SHAPES += [("e5m2", 16), ("e5m2", 32)]
SMALL = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
EACH = {"tf32": 1, "f16": 2, "bf16": 2, "e4m3": 4, "e5m2": 4}


def word(kind, numbers):
    """The register that holds `numbers`, the first in the lowest bits."""
    if kind == "tf32":  # its lowest 13 bits are not read
        return int(np.float32(numbers[0]).view("u4")) | 0x1ABC
    if kind in SMALL:
        return int(torch.tensor(numbers).float().to(SMALL[kind]).view(torch.int32)) & (1 << 32) - 1
    halves = [int(np.float16(n).view("u2")) if kind == "f16" else int(np.float32(n).view("u4")) >> 16 for n in numbers]
    return halves[0] | halves[1] << 16


def fragments(kind, left, right, sums):
    """The registers of each lane, by where the PTX ISA puts each element."""
    each, depth = EACH[kind], left.shape[1]
    half = 4 * each
    a = [[[0] * each for _ in range(2 * depth // half)] for _ in range(32)]
    b = [[[0] * each for _ in range(depth // half)] for _ in range(32)]
    c = [[0.0] * 4 for _ in range(32)]
    for k in range(depth):
        for row in range(16):
            lane = row % 8 * 4 + k % half // each
            a[lane][row // 8 + 2 * (k // half)][k % each] = left[row, k]
        for column in range(8):
            b[column * 4 + k % half // each][k // half][k % each] = right[k, column]
    for row in range(16):
        for column in range(8):
            c[row % 8 * 4 + column // 2][row // 8 * 2 + column % 2] = sums[row, column]
    words = [[word(kind, part) for part in (*a[lane], *b[lane])] for lane in range(32)]
    return np.array(words, "u4"), np.array(c, "f4")


def text(kind, depth, parts):
    """Each lane loads its registers, multiplies, and stores its four sums."""
    loads = "".join(f"ld.global.u32 %r{10 + n}, [%rd4+{4 * n}]; " for n in range(3 * parts))
    loads += "".join(f"ld.global.u32 %r{30 + n}, [%rd6+{4 * n}]; " for n in range(4))
    a, b = (", ".join(f"%r{n}" for n in r) for r in (range(10, 10 + 2 * parts), range(10 + 2 * parts, 10 + 3 * parts)))
    c, d = (", ".join(f"%r{n}" for n in range(first, first + 4)) for first in (30, 40))
    stores = "".join(f"st.global.u32 [%rd6+{4 * n}], %r{40 + n}; " for n in range(4))
    return f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, {12 * parts}; add.s64 %rd4, %rd0, %rd3;
        mul.wide.u32 %rd5, %r1, 16; add.s64 %rd6, %rd1, %rd5; {loads}
        mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}}; {stores}"""


@pytest.mark.parametrize("unit", ["warp", "block"])
@pytest.mark.parametrize(("kind", "depth"), SHAPES)
def test_a_product_is_exact(kind, depth, unit):
    rng = np.random.default_rng(depth)
    registers, sums, wanted = [], [], []
    for _ in range(2):  # two warps
        left, right, start = (rng.integers(-4, 5, shape) for shape in ((16, depth), (depth, 8), (16, 8)))
        parts, own = fragments(kind, left, right, start)
        registers.append(parts)
        sums.append(own)
        wanted.append(fragments(kind, left, right, left @ right + start)[1])
    given, out = np.concatenate(registers), np.concatenate(sums)
    run(kernel(text(kind, depth, given.shape[1] // 3), 2), [given, out], threads=64, unit=unit)
    assert np.array_equal(out, np.concatenate(wanted))


def test_a_sum_is_rounded_once():
    left, right, start = np.zeros((16, 8)), np.ones((8, 8)), np.full((16, 8), 2.0**24)
    left[:, 1] = left[:, 3] = 1.0  # either alone would be lost
    given, out = fragments("bf16", left, right, start)
    run(kernel(text("bf16", 8, given.shape[1] // 3), 2), [given, out])
    assert (out == 2.0**24 + 2).all()


def test_a_nan_is_the_canonical_one():
    left, right, start = np.zeros((16, 16)), np.ones((16, 8)), np.zeros((16, 8))
    left[3, 5] = np.inf
    right[5, 2] = 0.0
    given, out = fragments("f16", left, right, start)
    run(kernel(text("f16", 16, given.shape[1] // 3), 2), [given, out])
    wanted = np.zeros((16, 8))
    wanted[3] = np.inf
    wanted[3, 2] = np.nan
    _, expected = fragments("f16", left, right, wanted)
    assert np.array_equal(out, expected, equal_nan=True) and set(out[np.isnan(out)].view("u4")) == {0x7FFFFFFF}


@triton.jit
def dot(x_ptr, y_ptr, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K)
    x, y = tl.load(x_ptr + m * K + k[None, :]), tl.load(y_ptr + k[:, None] * N + n[None, :])
    tl.store(out + m * N + n[None, :], tl.dot(x, y))


@pytest.mark.parametrize(
    ("dtype", "architecture", "warps"),
    [
        (torch.bfloat16, "sm_90", 2),
        (torch.float16, "sm_80", 4),
        (torch.float32, "sm_80", 1),
        (torch.float8_e4m3fn, "sm_89", 4),
        (torch.float8_e5m2, "sm_89", 2),
    ],
)
def test_a_dot_of_triton_is_exact(dtype, architecture, warps):
    def body(comm):
        x = (torch.arange(32 * 64).reshape(32, 64) % 7 - 3).float().to(dtype)
        y = (torch.arange(64 * 16).reshape(64, 16) % 9 - 4).float().to(dtype)
        out = torch.full((32, 16), float("nan"))
        comm.launch(dot, 1, x, y, out, M=32, N=16, K=64, num_warps=warps)
        return out, x.float() @ y.float()

    ((got, wanted),) = tricomm.simulate(body, 1, compiled=architecture)
    assert torch.equal(got, wanted)
