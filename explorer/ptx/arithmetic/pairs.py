"""cvt from and to registers that hold two numbers: halves, 8, 6 and 4 bits, and exponents."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form
from tricomm.explorer.ptx.arithmetic.functions import function
from tricomm.explorer.ptx.arithmetic.rounding import FORMATS, decoded, encoded, narrowed
from tricomm.explorer.ptx.arithmetic.rule import Rule

_HALVES = ("f16x2", "bf16x2")
_SMALL = ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2")


def rule(form: Form) -> Rule | None:
    if form.opcode != "cvt":
        return None
    if "pack" in form.flags:
        return _packed(form)
    if len(form.types) != 2:
        return None
    to, of = form.types
    if to == "ue8m0x2":
        return _to_exponents(form, of)
    if to in _HALVES and of == "f32":
        return _to_halves(form)
    if to in _SMALL and of in ("f32", *_HALVES):
        return _to_small(form)
    if to in _HALVES and of in _SMALL and form.has(1, 1, "rn", "relu") and "rn" in form.flags:
        word = "u1" if of == "e2m1x2" else "u2"
        return form.rule((word,), ("u4",), f"widened_pair({{0}}, '{of[:-2]}', '{to[:-2]}', {'relu' in form.flags})")
    if (to, of) == ("bf16x2", "ue8m0x2") and form.flags == ("rn",) and form.has(1, 1, "rn"):
        return form.rule(("u2",), ("u4",), "from_exponents({0})")
    return None


def _to_halves(form: Form) -> Rule | None:
    kind, flags = form.types[0], set(form.flags)
    if not form.has(1, 2, "rn", "rz", "relu", "satfinite") or len(flags & {"rn", "rz"}) != 1:
        return None
    if flags == {"rn"}:
        return form.rule(("f4", "f4"), ("u4",), f"to_{kind}({{0}}, {{1}})")
    mode = "rn" if "rn" in flags else "rz"
    given = f"'{kind[:-2]}', '{mode}', {'satfinite' in flags}, {'relu' in flags}"
    return form.rule(("f4", "f4"), ("u4",), f"joined(narrowed({{0}}, {given}), narrowed({{1}}, {given}), 16, u4)")


def _to_small(form: Form) -> Rule | None:
    to, of = form.types
    count = 2 if of == "f32" else 1
    if not form.has(1, count, "rn", "satfinite", "relu") or not {"rn", "satfinite"} <= set(form.flags):
        return None
    name = to[:-2]
    shift, word = (4, "u1") if name == "e2m1" else (8, "u2")
    given = f"'{name}', 'rn', True, {'relu' in form.flags}"
    if of == "f32":
        return form.rule(
            ("f4", "f4"), (word,), f"joined(narrowed({{0}}, {given}), narrowed({{1}}, {given}), {shift}, {word})"
        )
    return form.rule(("u4",), (word,), f"narrowed_pair({of[:-2]}_halves({{0}}), {shift}, {word}, {given})")


@function
def joined(high: Any, low: Any, shift: int, word: Any) -> Any:
    return (high.astype(word) << word.type(shift)) | low.astype(word)


@function
def narrowed_pair(halves: tuple[Any, Any], shift: int, word: Any, *given: Any) -> Any:
    return joined(narrowed(halves[1], *given), narrowed(halves[0], *given), shift, word)


_TABLES: dict[tuple[str, str, bool], Any] = {}


def _table(of: str, to: str, relu: bool) -> Any:
    """The bits in the format `to` of all numbers of the small format `of`."""
    key = (of, to, relu)
    if key not in _TABLES:
        values = decoded(of)
        _TABLES[key] = encoded(np.where(values <= 0, 0.0, values) if relu else values, FORMATS[to]).astype(np.uint32)
    return _TABLES[key]


@function
def widened_pair(x: Any, of: str, to: str, relu: bool) -> Any:
    table, kind = _table(of, to, relu), x.dtype.type
    bits = 4 if of == "e2m1" else 8
    low = table[x & kind((1 << bits) - 1)]
    return (table[x >> kind(bits)] << np.uint32(16)) | low


def _to_exponents(form: Form, of: str) -> Rule | None:
    """Powers of two: the exponent's bits, rounded towards zero or up; the sign is lost."""
    flags = set(form.flags)
    if len(flags & {"rz", "rp"}) != 1 or flags - {"rz", "rp", "satfinite"}:
        return None
    given = f"{'rp' in flags}, {'satfinite' in flags}"
    if of == "f32" and form.has(1, 2, *flags):
        return form.rule(("f4", "f4"), ("u2",), f"joined(exponents({{0}}, {given}), exponents({{1}}, {given}), 8, u2)")
    if of == "bf16x2" and form.has(1, 1, *flags):
        return form.rule(("u4",), ("u2",), f"exponent_pair(bf16_halves({{0}}), {given})")
    return None


@function
def exponents(x: Any, up: bool, finite: bool) -> Any:
    bits = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    result = bits >> np.uint32(23)
    if up:
        # 2^-127 is a subnormal float.
        above = ((bits & np.uint32(0x7FFFFF)) != 0) & (bits > 0x400000) & (bits < 0x7F800000)
        result = result + above.astype(np.uint32)
    if finite:
        result = np.where((bits <= 0x7F800000) & (result == 255), np.uint32(254), result)
    return result.astype(np.uint8)


@function
def exponent_pair(halves: tuple[Any, Any], up: bool, finite: bool) -> Any:
    return joined(exponents(halves[1], up, finite), exponents(halves[0], up, finite), 8, np.dtype(np.uint16))


@function
def from_exponents(x: Any) -> Any:
    """As bf16: 2^-127 is subnormal, 255 is NaN."""
    low, high = (x & x.dtype.type(255)).astype(np.uint32), (x >> x.dtype.type(8)).astype(np.uint32)
    low, high = (
        np.where(y == 255, np.uint32(0x7FFF), np.where(y == 0, np.uint32(0x40), y << np.uint32(7))) for y in (low, high)
    )
    return (high << np.uint32(16)) | low


_PACKED = {"u16": 16, "s16": 16, "u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2}


def _packed(form: Form) -> Rule | None:
    """Two saturated integers, in front of a third operand's low bits."""
    if form.flags != ("pack", "sat") or len(form.types) < 2 or form.types[1] != "s32":
        return None
    bits = _PACKED.get(form.types[0])
    count = 2 if bits == 16 else 3
    if bits is None or form.types[2:] != (("b32",) if count == 3 else ()) or not form.has(1, count, "pack", "sat"):
        return None
    signed = form.types[0][0] == "s"
    inputs = ("i4", "i4") if count == 2 else ("i4", "i4", "u4")
    above = ", {2}" if count == 3 else ""
    return form.rule(inputs, ("u4",), f"packed_integers({{0}}, {{1}}, {bits}, {signed}{above})")


@function
def packed_integers(a: Any, b: Any, bits: int, signed: bool, above: Any = None) -> Any:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    ones = np.uint32((1 << bits) - 1)
    first, second = (np.clip(x, np.int32(low), np.int32(high)).view(np.uint32) & ones for x in (a, b))
    result = (first << np.uint32(bits)) | second
    return result if above is None else result | (above << np.uint32(2 * bits))
