"""Comparisons and selections: setp, set, selp."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, Rule, numpy_type, width
from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS, function

_INTEGER = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_HALVES = ("f16x2", "bf16x2")
_FLOATS = {"f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8"}
_ORDERED = {
    "eq": "{x} == {y}",
    "lt": "{x} < {y}",
    "le": "{x} <= {y}",
    "gt": "{x} > {y}",
    "ge": "{x} >= {y}",
    "neu": "{x} != {y}",
    "ne": "({x} < {y}) | ({x} > {y})",
    "equ": "~(({x} < {y}) | ({x} > {y}))",
    "ltu": "~({x} >= {y})",
    "leu": "~({x} > {y})",
    "gtu": "~({x} <= {y})",
    "geu": "~({x} < {y})",
    "num": "({x} == {x}) & ({y} == {y})",
    "nan": "({x} != {x}) | ({y} != {y})",
}


def rule(form: Form) -> Rule | None:
    make = _RULES.get(form.opcode)
    return make(form) if make is not None else None


def _comparison(form: Form, kind: str) -> tuple[str, str] | None:
    """(expression of `{0}` and `{1}`, numpy type of both)."""
    rest, ftz = [flag for flag in form.flags if flag != "ftz"], "ftz" in form.flags
    if len(rest) != 1 or len(form.sources) != 2:
        return None
    (operator,) = rest
    if kind in _FLOATS:
        if operator not in _ORDERED or ftz and kind not in ("f32", "f16"):
            return None
        x, y = "{0}", "{1}"
        if kind == "bf16":
            x, y = "from_bf16({0})", "from_bf16({1})"
        if ftz:
            x, y = f"flushed_{_FLOATS[kind]}({x})", f"flushed_{_FLOATS[kind]}({y})"
        return _ORDERED[operator].format(x=x, y=y), _FLOATS[kind]
    if ftz or kind not in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"):
        return None
    symbol = _INTEGER.get(operator) or _UNSIGNED.get(operator)
    if symbol is None or kind[0] == "b" and operator not in ("eq", "ne") or kind[0] == "s" and operator in _UNSIGNED:
        return None
    return f"{{0}} {symbol} {{1}}", numpy_type(kind)


def _setp(form: Form) -> Rule | None:
    if len(form.types) != 1:
        return None
    if form.type in _HALVES:
        made = _of_halves(form)
        return form.rule(("u4", "u4"), ("?", "?"), made) if made and len(form.destinations) == 2 else None
    compared = _comparison(form, form.type)
    if compared is None or len(form.destinations) != 1:
        return None
    expression, kind = compared
    either = kind if expression in ("{0} == {1}", "{0} != {1}") and kind[0] == "u" and form.type != "bf16" else None
    return form.rule((kind, kind), ("?",), expression, either)


def _of_halves(form: Form) -> str | None:
    """An expression with two results, one for the low halves and one for the high halves."""
    if _comparison(form, form.type.removesuffix("x2")) is None:
        return None
    operator = next(flag for flag in form.flags if flag != "ftz")
    halves = f"{form.type[:-2]}_halves"
    a, b = f"{halves}({{0}})", f"{halves}({{1}})"
    if "ftz" in form.flags:
        a, b = f"flushed_halves({a})", f"flushed_halves({b})"
    return f"compared_halves(lambda x, y: {_ORDERED[operator].format(x='x', y='y')}, {a}, {b})"


def _set(form: Form) -> Rule | None:
    """1.0 in each half whose comparison is true."""
    if form.types not in (("f16x2",) * 2, ("bf16x2",) * 2) or len(form.destinations) != 1:
        return None
    made, one = _of_halves(form), 0x3C00 if form.type == "f16x2" else 0x3F80
    return form.rule(("u4", "u4"), ("u4",), f"ones_in_halves({made}, {one})") if made else None


@function
def ones_in_halves(results: tuple[Any, Any], one: int) -> Any:
    low, high = (result.astype(np.uint32) for result in results)
    return (low | (high << np.uint32(16))) * np.uint32(one)


@function
def flushed_halves(halves: tuple[Any, Any]) -> tuple[Any, ...]:
    return tuple(FUNCTIONS["flushed_f16"](half) for half in halves)


@function
def compared_halves(compare: Any, a: Any, b: Any) -> tuple[Any, ...]:
    return tuple(compare(x, y) for x, y in zip(a, b, strict=True))


def _selp(form: Form) -> Rule | None:
    if len(form.types) != 1 or not form.has(1, 3) or form.type not in _SELECTED:
        return None
    kind = numpy_type(form.type)
    word = f"u{width(form.type) // 8}" if kind[0] == "i" else kind
    kinds, one, other = (word, word, "?"), form.value(0), form.value(1)
    if word[0] == "u" and 0 in (one, other):
        chosen, factor = ("{0}", f"{{2}}.astype({word})") if other == 0 else ("{1}", f"(~{{2}}).astype({word})")
        value = one if other == 0 else other
        template = factor if value == 1 else f"-{factor}" if value == -1 else f"{chosen} * {factor}"
        return form.rule(kinds, (word,), template)
    return form.rule(kinds, (word,), "selected({2}, {0}, {1})", either=word if word[0] == "u" else None)


_SELECTED = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
_copyto = np.copyto


@function
def selected(condition: Any, a: Any, b: Any) -> Any:
    """`numpy.where`, but at a third of its cost for few lanes."""
    if condition.shape:
        if b.shape:
            result = b.copy()
            _copyto(result, a, where=condition)
            return result
        if a.shape:
            result = a.copy()
            _copyto(result, b, where=~condition)
            return result
        return np.where(condition, a, b)
    return a if condition else b


_RULES = {"setp": _setp, "set": _set, "selp": _selp}
