"""Users' kernels for the launch path."""

import triton
import triton.language as tl


@triton.jit
def scaled(x_ptr, pair, n, f, flag, one, big, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, tl.load(pair[0] + i, i < n) * f + one + big * 2.0, flag & (i < n))


@triton.jit
def hungry(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    tl.store(x_ptr + i[None, :] * N + i[:, None], tl.dot(x, x))


@triton.jit
def filled(x_ptr, value, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, i + value)


OFFSET = tl.constexpr(3)


@triton.jit
def shifted(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, i + OFFSET)
