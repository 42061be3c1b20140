"""Counting and finding bits, reversing them, and products of packed bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, numpy_type
from tricomm.explorer.ptx.arithmetic.functions import function
from tricomm.explorer.ptx.arithmetic.rule import Rule


def rule(form: Form) -> Rule | None:
    make = _RULES.get(form.opcode)
    return make(form) if make is not None else None


def _count(form: Form) -> Rule | None:
    """popc, clz and brev."""
    if form.types not in (("b32",), ("b64",)) or not form.has(1, 1):
        return None
    kind = numpy_type(form.type)
    name = {"popc": "bits_set", "clz": "leading_zeros", "brev": "bits_reversed"}[form.opcode]
    return form.rule((kind,), (kind if form.opcode == "brev" else "u4",), f"{name}({{0}})")


@function
def bits_set(x: Any) -> Any:
    """The sum of the bits, by pairs, nibbles and bytes."""
    kind, bits = x.dtype.type, x.dtype.itemsize * 8
    ones = (1 << bits) - 1
    x = x - ((x >> kind(1)) & kind(ones // 3))
    x = (x & kind(ones // 5)) + ((x >> kind(2)) & kind(ones // 5))
    x = (x + (x >> kind(4))) & kind(ones // 17)
    return ((x * kind(ones // 255)) >> kind(bits - 8)).astype(np.uint32)


def _spread_down(x: Any) -> Any:
    """`x` with all bits below the highest set one set."""
    kind = x.dtype.type
    for shift in (1, 2, 4, 8, 16, 32)[: x.dtype.itemsize.bit_length() + 2]:
        x = x | (x >> kind(shift))
    return x


@function
def leading_zeros(x: Any) -> Any:
    return np.uint32(x.dtype.itemsize * 8) - bits_set(_spread_down(x))


@function
def bits_reversed(x: Any) -> Any:
    kind, bits = x.dtype.type, x.dtype.itemsize * 8
    ones = (1 << bits) - 1
    shift = bits // 2
    while shift:
        # Alternating groups of `shift` bits change places.
        low = kind(ones // ((1 << shift) + 1))
        x = ((x >> kind(shift)) & low) | ((x & low) << kind(shift))
        shift //= 2
    return x


def _bfind(form: Form) -> Rule | None:
    if len(form.types) != 1 or form.type not in ("u32", "u64", "s32", "s64") or not form.has(1, 1, "shiftamt"):
        return None
    kind = numpy_type(form.type)
    return form.rule((kind,), ("u4",), f"highest_bit({{0}}, {'shiftamt' in form.flags})")


@function
def highest_bit(x: Any, from_top: bool) -> Any:
    """The position, or distance from the top, of the highest bit that differs from the sign; all ones for none."""
    bits = x.dtype.itemsize * 8
    if x.dtype.kind == "i":
        x = (x ^ (x >> x.dtype.type(bits - 1))).view(f"u{x.dtype.itemsize}")
    zeros = leading_zeros(x)
    if from_top:
        return np.where(zeros == bits, ~np.uint32(0), zeros)
    return np.uint32(bits - 1) - zeros


def _fns(form: Form) -> Rule | None:
    if form.types != ("b32",) or not form.has(1, 3):
        return None
    return form.rule(("u4", "u4", "i4"), ("u4",), "nth_set({0}, {1}, {2})")


@function
def nth_set(mask: Any, base: Any, offset: Any) -> Any:
    """The position of the bit that is the `offset`-th set one from `base`, or all ones."""
    mask, base, offset = np.broadcast_arrays(mask, base, offset)
    result = np.full(mask.shape, 0xFFFFFFFF, np.uint32)
    up = offset > 0
    left = np.where(offset == 0, 1, np.abs(offset.astype(np.int64)))
    for distance in range(32):
        position = base.astype(np.int64) + np.where(up, distance, -distance)
        inside = (position >= 0) & (position < 32) & ((offset != 0) | (distance == 0))
        hit = inside & ((mask >> np.clip(position, 0, 31).astype(np.uint32)) & np.uint32(1) == 1)
        left = left - hit
        result = np.where(hit & (left == 0), position.astype(np.uint32), result)
        left = np.where(hit & (left == 0), -1, left)
    return result


def _dot(form: Form) -> Rule | None:
    if len(form.types) != 2 or not set(form.types) <= {"u32", "s32"}:
        return None
    modes = ("lo", "hi") if form.opcode == "dp2a" else ()
    if not form.has(1, 3, *modes) or bool(form.flags) != bool(modes) or len(form.flags) > 1:
        return None
    a, b = (numpy_type(kind)[0] for kind in form.types)
    word = "u4" if form.types == ("u32", "u32") else "i4"
    if form.opcode == "dp4a":
        return form.rule(("u4", "u4", word), (word,), f"dot_product({{0}}, {{1}}, {{2}}, {a}1, {b}1, 0)")
    first = 2 if form.flags == ("hi",) else 0
    return form.rule(("u4", "u4", word), (word,), f"dot_product({{0}}, {{1}}, {{2}}, {a}2, {b}1, {first})")


@function
def dot_product(a: Any, b: Any, total: Any, a_part: Any, b_part: Any, first: int) -> Any:
    for i in range(4 // a_part.itemsize):
        x = (a >> np.uint32(8 * a_part.itemsize * i)).astype(f"u{a_part.itemsize}").view(a_part)
        y = (b >> np.uint32(8 * (first + i))).astype(np.uint8).view(b_part)
        total = total + (x.astype(np.int32) * y.astype(np.int32)).astype(total.dtype)
    return total


_RULES = {"popc": _count, "clz": _count, "brev": _count, "bfind": _bfind, "fns": _fns, "dp4a": _dot, "dp2a": _dot}
