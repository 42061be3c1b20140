"""Doubles: a fused multiply-add and directed rounding, exact by error-free transformations or by fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS
from tricomm.explorer.ptx.arithmetic.rounding import Format, odd_sum, rounded

_SPLIT = np.float64(2**27 + 1)


def _split(x: Any) -> tuple[Any, Any]:
    """Two numbers of 26 digits whose sum is `x`."""
    scaled = _SPLIT * x
    high = scaled - (scaled - x)
    return high, x - high


def _two_product(a: Any, b: Any) -> tuple[Any, Any]:
    product = a * b
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _moderate(x: Any, bound: int) -> Any:
    size = np.abs(x)
    return (size < 2.0**bound) & (size > 2.0**-bound) | (x == 0)


def _separate(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in two operations. If c is infinite or NaN, a product of finite numbers counts as finite."""
    return np.where(np.isfinite(a) & np.isfinite(b) & ~np.isfinite(c), c + 0.0, a * b + c)


def fused_f8(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once to nearest."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product, low = _two_product(a, b)
    high, rest = _two_sum(c, low)
    high, middle = _two_sum(product, high)
    result = high + odd_sum(rest, middle)
    plain = _separate(a, b, c)
    # An exact zero has the sign that separate operations give.
    result = np.where(result == 0, plain, result)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    easy = _moderate(a, 450) & _moderate(b, 450) & (np.abs(c) < 2.0**1000)
    result = np.where(finite, result, plain)
    hard = finite & ~easy
    if hard.any():
        result = np.array(result)
        result[hard] = [_rounded("fma", "rn", x, y, z) for x, y, z in zip(a[hard], b[hard], c[hard], strict=True)]
    return result


def _nearest(exact: Fraction) -> float:
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _rounded(name: str, mode: str, *inputs: Any) -> float:
    """An operation on finite doubles, in fractions, rounded in a mode."""
    values = [Fraction(float(x)) for x in inputs]
    if name == "sqrt":
        near = math.sqrt(float(inputs[0]))
        order = Fraction(near) ** 2 - values[0]
        return _directed(near, (order > 0) - (order < 0), mode)
    exact = {
        "add": lambda: values[0] + values[1],
        "sub": lambda: values[0] - values[1],
        "mul": lambda: values[0] * values[1],
        "div": lambda: values[0] / values[1],
        "fma": lambda: values[0] * values[1] + values[2],
    }[name]()
    if exact == 0:
        return _zero(name, mode, *(float(x) for x in inputs))
    near = _nearest(exact)
    if math.isinf(near):
        return _directed(near, 1 if near > 0 else -1, mode)
    order = Fraction(near) - exact
    return _directed(near, (order > 0) - (order < 0), mode)


def _zero(name: str, mode: str, *inputs: float) -> float:
    """An exact zero: of a sum of opposite signs it is negative only if rounded down."""
    signs = [math.copysign(1.0, x) for x in inputs]
    if name in ("mul", "div"):
        return math.copysign(0.0, signs[0] * signs[1])
    first = signs[0] * signs[1] if name == "fma" else signs[0]
    second = signs[-1] if name != "sub" else -signs[-1]
    opposite = -0.0 if mode == "rm" else 0.0
    nothing = inputs[-1] == 0 and (first == second)
    return math.copysign(0.0, first) if nothing else opposite


def _directed(near: float, order: int, mode: str) -> float:
    """`near` is the nearest double, `order` the sign of it minus the exact value."""
    down = order > 0 and (mode == "rm" or mode == "rz" and near > 0)
    up = order < 0 and (mode == "rp" or mode == "rz" and near < 0)
    return math.nextafter(near, -math.inf) if down else math.nextafter(near, math.inf) if up else near


_PLAIN: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
    "fma": _separate,
}


def directed_f8(name: str, mode: str, *inputs: Any) -> Any:
    """An operation on doubles in any rounding mode."""
    if mode == "rn" and name == "fma":
        return fused_f8(*inputs)
    inputs = np.broadcast_arrays(*inputs)
    result = np.array(_PLAIN[name](*inputs))
    number = np.logical_and.reduce([np.isfinite(x) for x in inputs])
    if name == "div":
        number = number & (inputs[1] != 0)
    if name == "sqrt":
        number = number & (inputs[0] > 0)
    chosen = [x[number] for x in inputs]
    if number.any():
        result[number] = [_rounded(name, mode, *values) for values in zip(*chosen, strict=True)]
    return result


_HIGH = np.int64(-1 << 32)
_TOP = Format(20, -1022, float(np.uint64(0x7FEFFFFF00000000).view(np.float64)), 32, "u4", None)


def _gross(function: Any) -> Any:
    """A function of the upper 32 bits of a double, with 20 digits; subnormal numbers are zeros."""

    def approximation(x: Any) -> Any:
        x = (np.asarray(x).view(np.int64) & _HIGH).view(np.float64)
        x = np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)
        value = function(x)
        value = np.where(np.isfinite(value), rounded(value, _TOP, "rn"), value)
        return np.where(np.abs(value) < 2.0**-1022, np.copysign(0.0, value), value)

    return approximation


FUNCTIONS.update(gross_rcp=_gross(lambda x: 1.0 / x), gross_rsqrt=_gross(lambda x: 1.0 / np.sqrt(x)))
