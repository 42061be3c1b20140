"""Rounding an exact double to a narrower format in any mode, and exact sums that are safe to round again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tricomm.ptx.arithmetic.functions import function


@dataclass(frozen=True)
class Format:
    """`digits` of the stored significand; `least` exponent of a normal number; `infinite`: it has infinities.

    `nan` are the bits of its canonical NaN, or None if it has none (a NaN becomes the largest number).
    """

    digits: int
    least: int
    largest: float
    word: str
    nan: int | None
    infinite: bool = True


FORMATS = {
    "f32": Format(23, -126, float(np.finfo(np.float32).max), "u4", 0x7FFFFFFF),
    "tf32": Format(10, -126, (2 - 2.0**-10) * 2.0**127, "u4", 0x7FFFFFFF),
    "f16": Format(10, -14, 65504.0, "u2", 0x7FFF),
    "bf16": Format(7, -126, (2 - 2.0**-7) * 2.0**127, "u2", 0x7FFF),
    "e5m2": Format(2, -14, 57344.0, "u1", 0x7F),
    "e4m3": Format(3, -6, 448.0, "u1", 0x7F, infinite=False),
    "e3m2": Format(2, -2, 28.0, "u1", None, infinite=False),
    "e2m3": Format(3, 0, 7.5, "u1", None, infinite=False),
    "e2m1": Format(1, 0, 6.0, "u1", None, infinite=False),
}


def _away(x: Any) -> Any:
    return np.trunc(x + np.copysign(0.5, x))


_ROUND = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil, "rna": _away}


def rounded(x: Any, form: Format, mode: str, finite: bool = False) -> Any:
    """The double `x` as a number of the format, still a double; `finite`: never more than the largest number."""
    _, exponent = np.frexp(x)
    scale = np.maximum(exponent - 1, form.least) - form.digits
    value = np.ldexp(_ROUND[mode](np.ldexp(x, -scale)), scale)
    over = np.abs(value) > form.largest
    if over.any():
        up = np.inf if mode in ("rn", "rna", "rp") and not finite else form.largest
        down = -np.inf if mode in ("rn", "rna", "rm") and not finite else -form.largest
        # An infinity stays one in every mode.
        up_of_infinity = form.largest if finite else np.inf
        limit = np.where(x > 0, np.where(np.isinf(x), up_of_infinity, up), np.where(np.isinf(x), -up_of_infinity, down))
        value = np.where(over, limit, value)
    return value


def encoded(value: Any, form: Format) -> Any:
    """The bits of doubles that are numbers of the format, or infinite, or NaN."""
    _, exponent = np.frexp(np.where(np.isfinite(value), value, 1.0))
    exponent = np.maximum(exponent - 1, form.least)
    digits = np.ldexp(np.abs(value), form.digits - exponent)
    bits = np.where(np.isfinite(value), digits, 0.0).astype(np.int64) + ((exponent - form.least) << form.digits)
    top = np.dtype(form.word).itemsize * 8 - 1
    if form.nan is None:
        # These formats occupy the low bits of a byte; the sign is the next one up.
        top = int(np.log2(form.largest)) - form.least + 1
        top = (top + 1).bit_length() + form.digits - (1 if (top + 1) & top == 0 else 0)
    if form.infinite:
        infinity = encode_largest(form) + 1
        # tf32 keeps the low 13 bits of a word clear.
        bits = np.where(np.isinf(value), infinity, bits)
    shift = 13 if form is FORMATS["tf32"] else 0
    bits = (bits << shift) | (np.signbit(value).astype(np.int64) << top)
    return np.where(np.isnan(value), form.nan or 0, bits).astype(form.word)


def encode_largest(form: Format) -> int:
    exponent = int(np.floor(np.log2(form.largest)))
    return int(form.largest * 2.0 ** (form.digits - exponent)) + ((exponent - form.least) << form.digits)


@function
def narrowed(x: Any, name: str, mode: str = "rn", finite: bool = False, relu: bool = False) -> Any:
    """Floats of any type as bits of the format `name`."""
    form, x = FORMATS[name], x.astype(np.float64)
    if relu:
        x = np.where(x <= 0, 0.0, x)
    if form.nan is None:
        x = np.where(np.isnan(x), form.largest, x)
    return encoded(rounded(x, form, mode, finite), form)


@function
def odd_sum(a: Any, b: Any) -> Any:
    """a + b rounded to odd: rounded again to a type of two digits less, it is the exact sum rounded once."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = (error != 0) & np.isfinite(total)
    if not inexact.any():
        return total
    bits = np.asarray(total).view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact & (bits & 1 == 0), bits + step, bits).view(np.float64)
