"""Numbers of 16 bits: conversion from and to floats, arithmetic through floats, minimum and maximum."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS, function
from tricomm.explorer.ptx.arithmetic.rounding import odd_sum

_where, _empty, _nonzero = np.where, np.empty, np.count_nonzero
_F2, _F4, _F8, _U2, _U4 = (np.dtype(kind) for kind in ("f2", "f4", "f8", "u2", "u4"))
_NAN_4 = np.uint32(0x7FFFFFFF).view(_F4)
_NAN_2 = np.uint16(0x7FFF).view(_F2)
# Arrays without dimensions: with an array, a numpy scalar takes twice as long.
_SIXTEEN, _ONE, _HALF, _UPPER = (np.array(value, _U4) for value in (16, 1, 0x7FFF, 0xFFFF0000))


def _has_nan(x: Any) -> bool:
    """The scalar product with itself is NaN if any element is: the quickest test for it."""
    product = x.dot(x) if x.shape else x
    return bool(product != product)


@function
def canonical_f4(x: Any) -> Any:
    """With every NaN as 0x7fffffff."""
    # `_has_nan`, written out: this is the most frequent function of all.
    product = x.dot(x) if x.shape else x
    return x if product == product else _where(x == x, x, _NAN_4)


@function
def to_f16(x: Any) -> Any:
    """Floats, rounded to nearest; every NaN is 0x7fff."""
    return _where(x == x, x.astype(_F2), _NAN_2) if _has_nan(x) else x.astype(_F2)


@function
def from_bf16(x: Any) -> Any:
    return (x.astype(_U4) << _SIXTEEN).view(_F4)


def _bf16_above(x: Any) -> Any:
    """Words with a bf16 in the upper half: `x` rounded to nearest. The lower half is undefined."""
    bits = x.view(_U4)
    result = bits >> _SIXTEEN
    result &= _ONE
    result += bits
    result += _HALF
    return _where(x == x, result, np.uint32(0x7FFF0000)) if _has_nan(x) else result


@function
def to_bf16(x: Any) -> Any:
    """The bits of floats rounded to nearest; every NaN is 0x7fff."""
    result = _bf16_above(x)
    result >>= _SIXTEEN
    return result.astype(_U2)


@function
def to_bf16x2(high: Any, low: Any) -> Any:
    if high.shape != low.shape or not low.shape:
        return (_bf16_above(high) & _UPPER) | (_bf16_above(low) >> _SIXTEEN)
    both = _empty((len(low), 2), _F4)
    both[:, 0] = low
    both[:, 1] = high
    return _bf16_above(both.ravel()).view(_U2)[1::2].copy().view(_U4)


@function
def to_f16x2(high: Any, low: Any) -> Any:
    if high.shape != low.shape or not low.shape:
        return (to_f16(high).view(_U2).astype(_U4) << _SIXTEEN) | to_f16(low).view(_U2).astype(_U4)
    both = _empty((len(low), 2), _F4)
    both[:, 0] = low
    both[:, 1] = high
    return to_f16(both.ravel()).view(_U4)


@function
def bf16_halves(x: Any) -> tuple[Any, Any]:
    """The low halves and the high halves of packed bf16, as floats."""
    return (x << _SIXTEEN).view(_F4), (x & _UPPER).view(_F4)


@function
def f16_halves(x: Any) -> tuple[Any, Any]:
    return x.astype(_U2).view(_F2).astype(_F4), (x >> _SIXTEEN).astype(_U2).view(_F2).astype(_F4)


@function
def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of floats or halves as a double that may be rounded again."""
    return odd_sum(a.astype(_F8) * b.astype(_F8), c.astype(_F8))


def _extreme(choose: Any, less: bool, nan_wins: bool) -> Any:
    def extreme(a: Any, b: Any) -> Any:
        result = choose(a, b)
        if _nonzero(result) != result.size:
            # -0 is less than +0; between a zero and another number the choice was right.
            word = f"u{result.dtype.itemsize}"
            either = a.view(word) | b.view(word) if less else a.view(word) & b.view(word)
            result = _where((a == 0) & (b == 0), either.view(result.dtype), result)
        if not _has_nan(result):
            return result
        if not nan_wins:
            # numpy's fmin and fmax take a signalling NaN for a result.
            result = _where(a == a, _where(b == b, result, a), b)
        return canonical_f4(result) if result.dtype == _F4 else result

    return extreme


# `least` and `most` prefer a number to a NaN; the others give NaN if either is one.
FUNCTIONS.update(
    least=_extreme(np.minimum, True, False),
    most=_extreme(np.maximum, False, False),
    least_or_nan=_extreme(np.minimum, True, True),
    most_or_nan=_extreme(np.maximum, False, True),
)
