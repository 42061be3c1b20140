"""Comparisons and selections: setp, set, selp, slct, testp."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, numpy_type, width
from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS, function
from tricomm.explorer.ptx.arithmetic.rule import Rule

_INTEGER = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_COMBINE = {"and": "&", "or": "|", "xor": "^"}
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


def _comparison(form: Form, kind: str) -> tuple[str, str, str] | None:
    """(expression over `{0}` and `{1}`, numpy type of both, operation that combines it with a predicate or "")."""
    rest = [flag for flag in form.flags if flag != "ftz"]
    if not 1 <= len(rest) <= 2 or len(rest) == 2 and rest[1] not in _COMBINE:
        return None
    operator, combined, ftz = rest[0], rest[1] if len(rest) == 2 else "", "ftz" in form.flags
    if kind in _FLOATS:
        if operator not in _ORDERED or ftz and kind not in ("f32", "f16"):
            return None
        x, y = "{0}", "{1}"
        if kind == "bf16":
            x, y = "from_bf16({0})", "from_bf16({1})"
        if ftz:
            x, y = f"flushed_{_FLOATS[kind]}({x})", f"flushed_{_FLOATS[kind]}({y})"
        return _ORDERED[operator].format(x=x, y=y), _FLOATS[kind], combined
    if ftz or kind not in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"):
        return None
    symbol = _INTEGER.get(operator) or _UNSIGNED.get(operator)
    if symbol is None or kind[0] == "b" and operator not in ("eq", "ne") or kind[0] == "s" and operator in _UNSIGNED:
        return None
    return f"{{0}} {symbol} {{1}}", numpy_type(kind), combined


def _setp(form: Form) -> Rule | None:
    if len(form.types) != 1:
        return None
    if form.type in ("f16x2", "bf16x2"):
        return _setp_packed(form)
    compared = _comparison(form, form.type)
    if compared is None:
        return None
    expression, kind, combined = compared
    if len(form.sources) != (3 if combined else 2):
        return None
    kinds = (kind, kind, "?") if combined else (kind, kind)
    if len(form.destinations) == 2:
        if combined:
            return form.rule(kinds, ("?", "?"), f"both_{combined}({expression}, {{2}})")
        return form.rule(kinds, ("?", "?"), f"both({expression})")
    either = kind if expression in ("{0} == {1}", "{0} != {1}") and kind[0] == "u" and form.type != "bf16" else None
    if combined:
        return form.rule(kinds, ("?",), f"({expression}) {_COMBINE[combined]} {{2}}")
    return form.rule(kinds, ("?",), expression, either)


def _of_halves(form: Form) -> tuple[tuple[str, ...], str] | None:
    """(inputs, expression of two results: of the low halves and of the high ones)."""
    compared = _comparison(form, form.type.removesuffix("x2"))
    if compared is None or len(form.sources) != (3 if compared[2] else 2):
        return None
    combined = compared[2]
    operator = next(flag for flag in form.flags if flag != "ftz")
    halves = f"{form.type[:-2]}_halves"
    a, b = f"{halves}({{0}})", f"{halves}({{1}})"
    if "ftz" in form.flags:
        a, b = f"flushed_halves({a})", f"flushed_halves({b})"
    tail = f", {{2}}, '{combined}'" if combined else ""
    inputs = ("u4", "u4", "?") if combined else ("u4", "u4")
    return inputs, f"compared_halves('{operator}', {a}, {b}{tail})"


def _setp_packed(form: Form) -> Rule | None:
    made = _of_halves(form)
    return form.rule(made[0], ("?", "?"), made[1]) if made is not None and len(form.destinations) == 2 else None


def _set_packed(form: Form) -> Rule | None:
    """1.0 in each half whose comparison holds."""
    made = _of_halves(form)
    one = 0x3C00 if form.type == "f16x2" else 0x3F80
    return form.rule(made[0], ("u4",), f"ones_in_halves({made[1]}, {one})") if made is not None else None


@function
def ones_in_halves(results: tuple[Any, Any], one: int) -> Any:
    low, high = (result.astype(np.uint32) for result in results)
    return (low | (high << np.uint32(16))) * np.uint32(one)


@function
def flushed_halves(halves: tuple[Any, Any]) -> tuple[Any, ...]:
    return tuple(FUNCTIONS["flushed_f16"](half) for half in halves)


@function
def compared_halves(operator: str, a: Any, b: Any, predicate: Any = None, combined: str = "") -> tuple[Any, Any]:
    low, high = (_ordered(operator, x, y) for x, y in zip(a, b, strict=True))
    if not combined:
        return low, high
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combined]
    return combine(low, predicate), combine(high, predicate)


def _ordered(operator: str, x: Any, y: Any) -> Any:
    return {
        "eq": x == y,
        "lt": x < y,
        "le": x <= y,
        "gt": x > y,
        "ge": x >= y,
        "neu": x != y,
        "ne": (x < y) | (x > y),
        "equ": ~((x < y) | (x > y)),
        "ltu": ~(x >= y),
        "leu": ~(x > y),
        "gtu": ~(x <= y),
        "geu": ~(x < y),
        "num": (x == x) & (y == y),
        "nan": (x != x) | (y != y),
    }[operator]


@function
def both(result: Any) -> tuple[Any, Any]:
    return result, ~result


@function
def both_and(result: Any, predicate: Any) -> tuple[Any, Any]:
    return result & predicate, ~result & predicate


@function
def both_or(result: Any, predicate: Any) -> tuple[Any, Any]:
    return result | predicate, ~result | predicate


@function
def both_xor(result: Any, predicate: Any) -> tuple[Any, Any]:
    return result ^ predicate, ~result ^ predicate


def _set(form: Form) -> Rule | None:
    """All ones or 1.0 if the comparison holds."""
    if len(form.types) != 2 or len(form.destinations) != 1:
        return None
    result, compared_as = form.types
    if result in ("f16x2", "bf16x2"):
        return _set_packed(form) if result == compared_as else None
    compared = _comparison(form, compared_as)
    if compared is None or len(form.sources) != (3 if compared[2] else 2):
        return None
    expression, kind, combined = compared
    truth = f"(({expression}) {_COMBINE[combined]} {{2}})" if combined else f"({expression})"
    kinds = (kind, kind, "?") if combined else (kind, kind)
    if result in ("u16", "s16", "u32", "s32"):
        word = f"u{width(result) // 8}"
        return form.rule(kinds, (word,), f"-{truth}.astype({word})")
    if result in ("f16", "f32"):
        return form.rule(kinds, (_FLOATS[result],), f"{truth}.astype({_FLOATS[result]})")
    if result == "bf16":
        return form.rule(kinds, ("u2",), f"{truth}.astype(u2) * {form.constant(0x3F80, 'u2')}")
    return None


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
    """`numpy.where`, at a third of its cost for few lanes."""
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


def _slct(form: Form) -> Rule | None:
    rest = set(form.flags)
    if len(form.types) != 2 or form.types[0] not in _SELECTED or form.types[1] not in ("s32", "f32"):
        return None
    kind, chosen_by = numpy_type(form.types[0]), form.types[1]
    if not form.has(1, 3, "ftz") or rest and chosen_by != "f32":
        return None
    test = "flushed_f4({2})" if rest else "{2}"
    control = numpy_type(chosen_by)
    return form.rule((kind, kind, control), (kind,), f"selected({test} >= {form.constant(0, control)}, {{0}}, {{1}})")


_PROPERTY = {
    "finite": "{0} - {0} == {0} - {0}",
    "infinite": "absolute({0}) == {inf}",
    "number": "{0} == {0}",
    "notanumber": "{0} != {0}",
    "normal": "(absolute({0}) >= {least}) & (absolute({0}) < {inf}) | ({0} == {zero})",
    "subnormal": "(absolute({0}) < {least}) & ({0} != {zero})",
}


def _testp(form: Form) -> Rule | None:
    if form.type not in ("f32", "f64") or not form.has(1, 1, *_PROPERTY) or len(form.flags) != 1:
        return None
    kind = numpy_type(form.type)
    template = _PROPERTY[form.flags[0]]
    for name, value in (("inf", np.inf), ("least", float(np.finfo(kind).tiny)), ("zero", 0.0)):
        if f"{{{name}}}" in template:
            template = template.replace(f"{{{name}}}", form.constant(value, kind))
    return form.rule((kind,), ("?",), template)


_RULES = {"setp": _setp, "set": _set, "selp": _selp, "slct": _slct, "testp": _testp}
