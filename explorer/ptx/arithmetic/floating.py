"""Arithmetic of .f32, .f64, .f16 and .bf16: sums, products, fma, quotients, roots, minimum, sign, approximations."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, Rule, numpy_type
from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS, function
from tricomm.explorer.ptx.arithmetic.rounding import odd_sum

_TYPES = ("f16", "bf16", "f32", "f64")
_FLUSHED = ("f32", "f16")


def rule(form: Form) -> Rule | None:
    make = _RULES.get(form.opcode)
    return make(form) if make is not None and len(form.types) == 1 and form.type in _TYPES else None


def operands(kind: str, count: int, ftz: bool) -> list[str]:
    """The inputs in the type in which the operation computes: floats for halves."""
    read = {"f16": "{{{0}}}.astype(f4)", "bf16": "from_bf16({{{0}}})"}.get(kind, "{{{0}}}")
    texts = [read.format(i) for i in range(count)]
    if not ftz:
        return texts
    name = "flushed_f16" if kind == "f16" else "flushed_f4"
    return [f"{name}({one})" for one in texts]


def finished(kind: str, value: str, ftz: bool, sat: bool, relu: bool) -> str:
    """`value` as a result of type `kind`. For halves it is a float before."""
    if ftz and kind != "f16":
        value = f"flushed_f4({value})"
    if sat:
        value = f"unit_range({value})"
    if relu:
        value = f"rectified({value})"
    if kind == "f16":
        return f"to_flushed_f16({value})" if ftz else f"to_f16({value})"
    return {"bf16": f"to_bf16({value})", "f32": f"canonical_f4({value})"}.get(kind, value)


def _flags(form: Form, *allowed: str) -> tuple[bool, bool, bool] | None:
    """(ftz, sat, relu). None if there is another flag, or one that the type does not have."""
    ftz, sat, relu = ("ftz" in form.flags, "sat" in form.flags, "relu" in form.flags)
    if set(form.flags) - set(allowed):
        return None
    if ftz and form.type not in _FLUSHED and (form.opcode, form.type) != ("ex2", "bf16"):
        return None
    if sat and form.type not in ("f16", "f32") or relu and form.type not in ("f16", "bf16"):
        return None
    return ftz, sat, relu


_EXPRESSION = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}"}


def _binary(form: Form) -> Rule | None:
    parsed = _flags(form, "rn", "ftz", "sat")
    if parsed is None or not form.has(1, 2, *form.flags):
        return None
    kind = numpy_type(form.type)
    value = _EXPRESSION[form.opcode].format(*operands(form.type, 2, parsed[0]))
    return form.rule((kind,) * 2, (kind,), finished(form.type, value, *parsed))


def _fused(form: Form) -> Rule | None:
    parsed = _flags(form, "rn", "ftz", "sat", "relu")
    if parsed is None or not form.has(1, 3, *form.flags) or "rn" not in form.flags:
        return None
    if form.opcode == "mad" and form.type not in ("f32", "f64"):
        return None
    kind = numpy_type(form.type)
    given = ", ".join(operands(form.type, 3, parsed[0]))
    # The double is rounded to odd when it becomes a float, so that the rounding to a half is right.
    value = {"f64": f"fused_f8({given})", "f32": f"fused({given}).astype(f4)"}.get(
        form.type, f"odd_float(fused({given}))"
    )
    return form.rule((kind,) * 3, (kind,), finished(form.type, value, *parsed))


def _one_of(form: Form, *ways: str) -> bool:
    """True if exactly one flag is one of `ways`."""
    return sum(flag in ways for flag in form.flags) == 1


def _quotient(form: Form) -> Rule | None:
    """The correctly rounded quotient, also for `.approx` and `.full`, which allow an error."""
    parsed = _flags(form, "rn", "ftz", "approx", "full")
    if parsed is None or form.type not in ("f32", "f64") or not form.has(1, 2, *form.flags):
        return None
    if not _one_of(form, "rn", *(("approx", "full") if form.type == "f32" else ())):
        return None
    kind = numpy_type(form.type)
    a, b = operands(form.type, 2, parsed[0])
    value = f"approximate_quotient({a}, {b})" if "approx" in form.flags else f"{a} / {b}"
    return form.rule((kind,) * 2, (kind,), finished(form.type, value, *parsed))


@function
def approximate_quotient(a: Any, b: Any) -> Any:
    """As `.approx`: the inverse of a finite divisor beyond 2^126 is zero."""
    beyond = (np.absolute(b) > 2.0**126) & np.isfinite(b)
    return np.where(beyond, a * np.copysign(b.dtype.type(0), b), a / b)


def _root(form: Form) -> Rule | None:
    if form.type == "f64" and form.opcode in ("rcp", "rsqrt") and form.flags == ("approx", "ftz"):
        return form.rule(("f8",), ("f8",), f"gross_{form.opcode}({{0}})") if form.has(1, 1, *form.flags) else None
    parsed = _flags(form, "rn", "ftz", "approx")
    if parsed is None or form.type not in ("f32", "f64") or not form.has(1, 1, *form.flags):
        return None
    ways = ("rn",) if form.opcode != "rsqrt" else ()
    if not _one_of(form, *ways, *(("approx",) if form.type == "f32" or form.opcode == "rsqrt" else ())):
        return None
    kind = numpy_type(form.type)
    (a,) = operands(form.type, 1, parsed[0])
    value = f"inverse_root({a})" if form.opcode == "rsqrt" else f"sqrt({a})"
    if form.opcode == "rcp":
        value = f"{form.constant(1.0, kind)} / {a}"
    return form.rule((kind,), (kind,), finished(form.type, value, *parsed))


def _approximate(form: Form) -> Rule | None:
    """An approximation is computed in double precision and rounded once more."""
    parsed = _flags(form, "approx", "ftz")
    if parsed is None or form.type == "f64" or "approx" not in form.flags or not form.has(1, 1, *form.flags):
        return None
    if form.type in ("f16", "bf16") and form.opcode not in ("ex2", "tanh"):
        return None
    kind = numpy_type(form.type)
    (a,) = operands(form.type, 1, parsed[0])
    value = f"{_FUNCTION[form.opcode]}({a}.astype(f8)).astype(f4)"
    return form.rule((kind,), (kind,), finished(form.type, value, *parsed))


_FUNCTION = {"ex2": "exp2", "lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh"}
FUNCTIONS.update({name: getattr(np, name) for name in _FUNCTION.values()})


def _extreme(form: Form) -> Rule | None:
    if not form.has(1, 2, "ftz", "NaN", "xorsign", "abs") and not form.has(1, 3, "ftz", "NaN", "abs"):
        return None
    kind, ftz, xorsign, count = numpy_type(form.type), "ftz" in form.flags, "xorsign" in form.flags, len(form.sources)
    if (
        form.type == "f64"
        and (form.flags or count == 3)
        or ftz
        and form.type == "bf16"
        or count == 3
        and form.type != "f32"
    ):
        return None
    if ("abs" in form.flags) != xorsign and count == 2:
        return None
    name = ("least" if form.opcode == "min" else "most") + ("_or_nan" if "NaN" in form.flags else "")
    inputs = operands(form.type, count, ftz)
    if xorsign:
        value = f"with_sign({name}(absolute({inputs[0]}), absolute({inputs[1]})), {inputs[0]}, {inputs[1]})"
    elif "abs" in form.flags:
        value = f"absolute({name}({name}({inputs[0]}, {inputs[1]}), {inputs[2]}))"
    else:
        value = f"{name}({inputs[0]}, {inputs[1]})"
        value = f"{name}({value}, {inputs[2]})" if count == 3 else value
    # These functions return the canonical NaN of a float.
    if form.type in ("f16", "bf16"):
        value = finished(form.type, value, ftz, False, False)
    return form.rule((kind,) * count, (kind,), value)


@function
def with_sign(value: Any, a: Any, b: Any) -> Any:
    """`value` with the product of the signs of `a` and `b`, also if it is NaN."""
    sign = (a.view(np.uint32) ^ b.view(np.uint32)) & np.uint32(1 << 31)
    return (value.view(np.uint32) | sign).view(np.float32)


def _sign(form: Form) -> Rule | None:
    """`neg` and `abs` change only the sign bit, also of a NaN."""
    kind, ftz = numpy_type(form.type), "ftz" in form.flags
    if not form.has(1, 1, "ftz") or ftz and form.type not in ("f32", "f16"):
        return None
    if form.type in ("f16", "bf16"):
        mask = form.constant(0x8000 if form.opcode == "neg" else 0x7FFF, "u2")
        value = "{0}" if not ftz else "flushed_f2({0}.view(f2)).view(u2)"
        return form.rule(("u2",), ("u2",), f"{value} {'^' if form.opcode == 'neg' else '&'} {mask}")
    value = "flushed_f4({0})" if ftz else "{0}"
    return form.rule((kind,), (kind,), f"-{value}" if form.opcode == "neg" else f"absolute({value})")


def _copysign(form: Form) -> Rule | None:
    kind = numpy_type(form.type)
    if form.type not in ("f32", "f64") or not form.has(1, 2):
        return None
    return form.rule((kind,) * 2, (kind,), "copysign({1}, {0})")


FUNCTIONS["copysign"] = np.copysign


def _flush(kind: str, least: float) -> Any:
    bound = np.array(least, kind)

    def flushed(x: Any) -> Any:
        small = np.absolute(x) < bound
        return np.where(small, np.copysign(x.dtype.type(0), x), x) if small.any() else x

    return flushed


FUNCTIONS.update(
    flushed_f4=_flush("f4", 2.0**-126), flushed_f2=_flush("f2", 2.0**-14), flushed_f16=_flush("f4", 2.0**-14)
)


@function
def to_flushed_f16(x: Any) -> Any:
    return FUNCTIONS["flushed_f2"](FUNCTIONS["to_f16"](x))


@function
def unit_range(x: Any) -> Any:
    """`x` clamped to 0 to 1. A NaN becomes +0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


@function
def rectified(x: Any) -> Any:
    """`x` with negative numbers replaced by +0. A NaN stays a NaN."""
    return np.where(x <= 0, x.dtype.type(0), x)


@function
def odd_float(x: Any) -> Any:
    """A double as a float, rounded to odd."""
    value = x.astype(np.float32)
    back = value.astype(np.float64)
    inexact = (back != x) & np.isfinite(back)
    if not inexact.any():
        return value
    bits = np.asarray(value).view(np.int32)
    step = np.where((x > back) == (value > 0), 1, -1)
    step = np.where(back == 0, 1, step).astype(np.int32)
    away = np.where(back == 0, np.copysign(np.float32(0), x.astype(np.float32)).view(np.int32), bits)
    return np.where(inexact & (bits & 1 == 0), away + step, bits).view(np.float32)


@function
def inverse_root(x: Any) -> Any:
    if x.dtype == np.float64:
        return 1.0 / np.sqrt(x)
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32)


_where, _empty, _nonzero = np.where, np.empty, np.count_nonzero
_F2, _F4, _F8, _U2, _U4 = (np.dtype(kind) for kind in ("f2", "f4", "f8", "u2", "u4"))
_NAN_4 = np.uint32(0x7FFFFFFF).view(_F4)
_NAN_2 = np.uint16(0x7FFF).view(_F2)
# 0-dimensional arrays, because an operation of an array and a numpy scalar takes twice as long.
_SIXTEEN, _ONE, _HALF, _UPPER = (np.array(value, _U4) for value in (16, 1, 0x7FFF, 0xFFFF0000))


def _has_nan(x: Any) -> bool:
    """True if any element is NaN. Then the scalar product of `x` with itself is NaN, which is the fastest test."""
    product = x.dot(x) if x.shape else x
    return bool(product != product)


@function
def canonical_f4(x: Any) -> Any:
    """`x` with every NaN replaced by 0x7fffffff."""
    # `_has_nan`, written out, because this is the most frequently called function.
    product = x.dot(x) if x.shape else x
    return x if product == product else _where(x == x, x, _NAN_4)


@function
def to_f16(x: Any) -> Any:
    """Floats as f16, rounded to nearest. Every NaN becomes 0x7fff."""
    return _where(x == x, x.astype(_F2), _NAN_2) if _has_nan(x) else x.astype(_F2)


@function
def from_bf16(x: Any) -> Any:
    return (x.astype(_U4) << _SIXTEEN).view(_F4)


def _bf16_above(x: Any) -> Any:
    """`x` rounded to bf16, to nearest, in the upper halves of words. The lower halves are undefined."""
    bits = x.view(_U4)
    result = bits >> _SIXTEEN
    result &= _ONE
    result += bits
    result += _HALF
    return _where(x == x, result, np.uint32(0x7FFF0000)) if _has_nan(x) else result


@function
def to_bf16(x: Any) -> Any:
    """The bits of floats as bf16, rounded to nearest. Every NaN becomes 0x7fff."""
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
    """a * b + c of floats or halves, as a double that may be rounded again."""
    return odd_sum(a.astype(_F8) * b.astype(_F8), c.astype(_F8))


def _chooser(choose: Any, less: bool, nan_wins: bool) -> Any:
    def extreme(a: Any, b: Any) -> Any:
        result = choose(a, b)
        if _nonzero(result) != result.size:
            # -0 counts as less than +0. The choice between a zero and another number is right already.
            word = f"u{result.dtype.itemsize}"
            either = a.view(word) | b.view(word) if less else a.view(word) & b.view(word)
            result = _where((a == 0) & (b == 0), either.view(result.dtype), result)
        if not _has_nan(result):
            return result
        if not nan_wins:
            # Not by numpy's fmin and fmax, which return a signalling NaN even if the other input is a number.
            result = _where(a == a, _where(b == b, result, a), b)
        return canonical_f4(result) if result.dtype == _F4 else result

    return extreme


# `least` and `most` return the number if one input is NaN; the others return NaN.
FUNCTIONS.update(
    least=_chooser(np.minimum, True, False),
    most=_chooser(np.maximum, False, False),
    least_or_nan=_chooser(np.minimum, True, True),
    most_or_nan=_chooser(np.maximum, False, True),
)


_RULES = {
    "add": _binary, "sub": _binary, "mul": _binary, "fma": _fused, "mad": _fused, "div": _quotient, "sqrt": _root,
    "rcp": _root, "rsqrt": _root, "ex2": _approximate, "lg2": _approximate, "sin": _approximate, "cos": _approximate,
    "tanh": _approximate, "min": _extreme, "max": _extreme, "neg": _sign, "abs": _sign, "copysign": _copysign,
}  # fmt: skip
