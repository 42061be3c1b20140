"""cvt from and to registers that hold two numbers: halves, and numbers of 8, 6 and 4 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, Rule
from tricomm.explorer.ptx.arithmetic.functions import function
from tricomm.explorer.ptx.arithmetic.rounding import FORMATS, decoded, encoded, narrowed

_HALVES = ("f16x2", "bf16x2")
_SMALL = ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2")


def rule(form: Form) -> Rule | None:
    if form.opcode != "cvt" or len(form.types) != 2:
        return None
    to, of = form.types
    if to in _HALVES and of == "f32":
        return _to_halves(form)
    if to in _SMALL and of in ("f32", *_HALVES):
        return _to_small(form)
    if to in _HALVES and of in _SMALL and form.has(1, 1, "rn", "relu") and "rn" in form.flags:
        word = "u1" if of == "e2m1x2" else "u2"
        return form.rule((word,), ("u4",), f"widened_pair({{0}}, '{of[:-2]}', '{to[:-2]}', {'relu' in form.flags})")
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
    """The bits in format `to` of every number of the small format `of`."""
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
