"""Rounds exact doubles to narrower formats in any mode. Computes sums and products that may be rounded again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS, function


@dataclass(frozen=True)
class Format:
    """A floating-point format: `digits` of the stored significand, `least` exponent of a normal number, and `bits` in
    all, which are stored in a `word`.

    `nan` has the bits of its canonical NaN. None: it has no NaN, and a NaN becomes the largest number.
    """

    digits: int
    least: int
    largest: float
    bits: int
    word: str
    nan: int | None
    infinite: bool = True


FORMATS = {
    "f32": Format(23, -126, (2 - 2.0**-23) * 2.0**127, 32, "u4", 0x7FFFFFFF),
    "f16": Format(10, -14, 65504.0, 16, "u2", 0x7FFF),
    "bf16": Format(7, -126, (2 - 2.0**-7) * 2.0**127, 16, "u2", 0x7FFF),
    "e5m2": Format(2, -14, 57344.0, 8, "u1", 0x7F),
    "e4m3": Format(3, -6, 448.0, 8, "u1", 0x7F, infinite=False),
    "e3m2": Format(2, -2, 28.0, 6, "u1", None, infinite=False),
    "e2m3": Format(3, 0, 7.5, 6, "u1", None, infinite=False),
    "e2m1": Format(1, 0, 6.0, 4, "u1", None, infinite=False),
}


_ROUND: dict[str, Any] = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}


def rounded(x: Any, form: Format, mode: str, finite: bool = False) -> Any:
    """The double `x` rounded to a number of the format, still as a double. `finite`: at most the largest number."""
    _, exponent = np.frexp(x)
    scale = np.maximum(exponent - 1, form.least) - form.digits
    value = np.ldexp(_ROUND[mode](np.ldexp(x, -scale)), scale)
    over = np.abs(value) > form.largest
    if not over.any():
        return value
    # An infinity stays an infinity in every mode.
    grows = np.isinf(x) | (mode == "rn") | (x > 0) & (mode == "rp") | (x < 0) & (mode == "rm")
    limit = form.largest if finite else np.where(grows, np.inf, form.largest)
    return np.where(over, np.copysign(limit, x), value)


def encoded(value: Any, form: Format) -> Any:
    """The bits in the format of doubles that are numbers of the format, infinite, or NaN."""
    number = np.isfinite(value)
    _, exponent = np.frexp(np.where(number & (value != 0), value, 2.0**form.least))
    exponent = np.maximum(exponent - 1, form.least)
    digits = np.ldexp(np.where(number, np.abs(value), 0.0), form.digits - exponent).astype(np.int64)
    # The leading digit of a normal number adds one to the exponent field.
    bits = ((exponent - form.least).astype(np.int64) << form.digits) + digits
    if form.infinite:
        bits = np.where(np.isinf(value), (1 << form.bits - 1) - (1 << form.digits), bits)
    bits = bits | (np.signbit(value).astype(np.int64) << (form.bits - 1))
    return np.where(np.isnan(value), form.nan or 0, bits).astype(form.word)


@function
def narrowed(x: Any, name: str, mode: str = "rn", finite: bool = False, relu: bool = False) -> Any:
    """Floats of any type, as bits of the format `name`."""
    form, x = FORMATS[name], x.astype(np.float64)
    if relu:
        x = np.where(x <= 0, 0.0, x)
    if form.nan is None:
        x = np.where(np.isnan(x), form.largest, x)
    return encoded(rounded(x, form, mode, finite), form)


def decoded(name: str) -> Any:
    """The values of all bit patterns of a format of 8 bits or fewer, in order, as doubles."""
    form = FORMATS[name]
    patterns = np.arange(256)
    # The upper bits of a pattern, which a narrower format does not have, are ignored.
    magnitude, sign = patterns & ((1 << form.bits - 1) - 1), patterns >> form.bits - 1 & 1
    field, digits = magnitude >> form.digits, magnitude & ((1 << form.digits) - 1)
    value = np.ldexp((digits + np.where(field > 0, 1 << form.digits, 0)).astype(float), np.maximum(field, 1) - 1)
    value = np.ldexp(value, form.least - form.digits)
    top = (1 << form.bits - 1) - (1 << form.digits)
    if form.infinite:
        value = np.where(magnitude == top, np.inf, np.where(magnitude > top, np.nan, value))
    elif form.nan is not None:
        value = np.where(magnitude == form.nan, np.nan, value)
    return np.where(sign == 1, -value, value)


@function
def odd_sum(a: Any, b: Any) -> Any:
    """a + b rounded to odd. If it is rounded again, to a type with two digits less, the result is the exact sum rounded
    once."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = (error != 0) & np.isfinite(total)
    if not inexact.any():
        return total
    bits = np.asarray(total).view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact & (bits & 1 == 0), bits + step, bits).view(np.float64)


_SPLIT = np.float64(2**27 + 1)


def _split(x: Any) -> tuple[Any, Any]:
    """Split `x` into two numbers of 26 digits each."""
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


@function
def fused_f8(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once to nearest."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product, low = _two_product(a, b)
    high, rest = _two_sum(c, low)
    high, middle = _two_sum(product, high)
    result = high + odd_sum(rest, middle)
    plain = _separate(a, b, c)
    # An exact zero has the sign of the result of separate operations.
    result = np.where(result == 0, plain, result)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    easy = _moderate(a, 450) & _moderate(b, 450) & (np.abs(c) < 2.0**1000)
    result = np.where(finite, result, plain)
    hard = finite & ~easy
    if hard.any():
        result = np.array(result)
        exact = (_fused_exactly(*map(float, values)) for values in zip(a[hard], b[hard], c[hard], strict=True))
        result[hard] = list(exact)
    return result


def _fused_exactly(a: float, b: float, c: float) -> float:
    """a * b + c of finite doubles, computed with fractions. An exact zero has the sign of the result of separate
    operations."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


_HIGH = np.int64(-1 << 32)
_TOP = Format(20, -1022, float(np.uint64(0x7FEFFFFF00000000).view(np.float64)), 32, "u4", None)


def _gross(function: Any) -> Any:
    """A function of the upper 32 bits of a double, with a result of 20 digits. Subnormal numbers count as zeros."""

    def approximation(x: Any) -> Any:
        x = (np.asarray(x).view(np.int64) & _HIGH).view(np.float64)
        x = np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)
        value = function(x)
        value = np.where(np.isfinite(value), rounded(value, _TOP, "rn"), value)
        return np.where(np.abs(value) < 2.0**-1022, np.copysign(0.0, value), value)

    return approximation


FUNCTIONS.update(gross_rcp=_gross(lambda x: 1.0 / x), gross_rsqrt=_gross(lambda x: 1.0 / np.sqrt(x)))
