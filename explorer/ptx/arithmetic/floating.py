"""Arithmetic of .f32, .f64, .f16 and .bf16: sums, products, fma, quotients, roots, minimum, sign, approximations."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.exact import directed_f8
from tricomm.explorer.ptx.arithmetic.form import Form, numpy_type
from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS, function
from tricomm.explorer.ptx.arithmetic.half import canonical_f4
from tricomm.explorer.ptx.arithmetic.rounding import FORMATS, odd_sum, rounded
from tricomm.explorer.ptx.arithmetic.rule import Rule

_TYPES = ("f16", "bf16", "f32", "f64")
_ROUNDING = ("rn", "rz", "rm", "rp")
_FLUSHED = ("f32", "f16")
_DIRECTED = ("rz", "rm", "rp")


def rule(form: Form) -> Rule | None:
    make = _RULES.get(form.opcode)
    if form.types in (("f32", "f16"), ("f32", "bf16")):
        return _mixed(form)
    return make(form) if make is not None and len(form.types) == 1 and form.type in _TYPES else None


def _mixed(form: Form) -> Rule | None:
    """A float sum, of a half and a float, or of a product of halves and a float."""
    count = {"add": 2, "sub": 2, "fma": 3}.get(form.opcode)
    if count is None or not form.has(1, count, *_ROUNDING, "sat"):
        return None
    half = form.types[1]
    made = rule(form.of_type("f32"))
    if made is None:
        return None
    read = operands(half, count - 1, False)
    kinds = (numpy_type(half),) * (count - 1) + ("f4",)
    return form.rule(kinds, ("f4",), made.template.format(*read, f"{{{count - 1}}}"))


def operands(kind: str, count: int, ftz: bool) -> list[str]:
    """The inputs in the type of the computation: halves as floats."""
    read = {"f16": "{{{0}}}.astype(f4)", "bf16": "from_bf16({{{0}}})"}.get(kind, "{{{0}}}")
    texts = [read.format(i) for i in range(count)]
    if not ftz:
        return texts
    name = "flushed_f16" if kind == "f16" else "flushed_f4"
    return [f"{name}({one})" for one in texts]


def finished(kind: str, value: str, ftz: bool, sat: bool, relu: bool) -> str:
    """`value`, a float for halves, as a result of the type."""
    if ftz and kind != "f16":
        value = f"flushed_f4({value})"
    if sat:
        value = f"unit_range({value})"
    if relu:
        value = f"rectified({value})"
    if kind == "f16":
        return f"to_flushed_f16({value})" if ftz else f"to_f16({value})"
    return {"bf16": f"to_bf16({value})", "f32": f"canonical_f4({value})"}.get(kind, value)


def _flags(form: Form, allowed: tuple[str, ...]) -> tuple[str, bool, bool, bool] | None:
    """(rounding mode, ftz, sat, relu), or None if there is another flag or one that the type does not have."""
    modes = [flag for flag in form.flags if flag in _ROUNDING]
    ftz, sat, relu = ("ftz" in form.flags, "sat" in form.flags, "relu" in form.flags)
    if set(form.flags) - set(allowed) or len(modes) > 1:
        return None
    if ftz and form.type not in _FLUSHED and (form.opcode, form.type) != ("ex2", "bf16"):
        return None
    if sat and form.type not in ("f16", "f32") or relu and form.type not in ("f16", "bf16"):
        return None
    mode = modes[0] if modes else "rn"
    if mode in _DIRECTED and form.type in ("f16", "bf16"):
        return None
    return mode, ftz, sat, relu


_EXPRESSION = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}"}


def _binary(form: Form) -> Rule | None:
    parsed = _flags(form, (*_ROUNDING, "ftz", "sat"))
    if parsed is None or not form.has(1, 2, *form.flags):
        return None
    mode, ftz, sat, relu = parsed
    kind = numpy_type(form.type)
    a, b = operands(form.type, 2, ftz)
    value = _EXPRESSION[form.opcode].format(a, b)
    if mode in _DIRECTED:
        value = f"directed_{kind}('{form.opcode}', '{mode}', {a}, {b})"
    return form.rule((kind,) * 2, (kind,), finished(form.type, value, ftz, sat, relu))


def _fused(form: Form) -> Rule | None:
    parsed = _flags(form, (*_ROUNDING, "ftz", "sat", "relu"))
    if parsed is None or not form.has(1, 3, *form.flags) or not set(form.flags) & set(_ROUNDING):
        return None
    if form.opcode == "mad" and form.type not in ("f32", "f64"):
        return None
    mode, ftz, sat, relu = parsed
    kind = numpy_type(form.type)
    a, b, c = operands(form.type, 3, ftz)
    if form.type == "f64":
        value = f"directed_f8('fma', '{mode}', {a}, {b}, {c})"
    elif mode in _DIRECTED:
        value = f"directed_f4('fma', '{mode}', {a}, {b}, {c})"
    elif form.type == "f32":
        value = f"fused({a}, {b}, {c}).astype(f4)"
    else:
        # The double is rounded to odd to a float first, so that a half is rounded once.
        value = f"odd_float(fused({a}, {b}, {c}))"
    return form.rule((kind,) * 3, (kind,), finished(form.type, value, ftz, sat, relu))


def _one_of(form: Form, *ways: str) -> bool:
    """Whether the flags name exactly one of these ways to round."""
    return sum(flag in ways for flag in form.flags) == 1


def _quotient(form: Form) -> Rule | None:
    """`.approx` and `.full` are allowed errors; the value is the correctly rounded one."""
    parsed = _flags(form, (*_ROUNDING, "ftz", "approx", "full"))
    if parsed is None or form.type not in ("f32", "f64") or not form.has(1, 2, *form.flags):
        return None
    ways = (*_ROUNDING, "approx", "full") if form.type == "f32" else _ROUNDING
    if not _one_of(form, *ways):
        return None
    mode, ftz, *_ = parsed
    kind = numpy_type(form.type)
    a, b = operands(form.type, 2, ftz)
    value = f"{a} / {b}" if mode == "rn" else f"directed_{kind}('div', '{mode}', {a}, {b})"
    if "approx" in form.flags:
        value = f"approximate_quotient({a}, {b})"
    return form.rule((kind,) * 2, (kind,), finished(form.type, value, ftz, False, False))


@function
def approximate_quotient(a: Any, b: Any) -> Any:
    """The inverse of a finite divisor beyond 2^126 is zero."""
    beyond = (np.absolute(b) > 2.0**126) & np.isfinite(b)
    return np.where(beyond, a * np.copysign(b.dtype.type(0), b), a / b)


def _root(form: Form) -> Rule | None:
    if form.type == "f64" and form.opcode in ("rcp", "rsqrt") and form.flags == ("approx", "ftz"):
        return form.rule(("f8",), ("f8",), f"gross_{form.opcode}({{0}})") if form.has(1, 1, *form.flags) else None
    parsed = _flags(form, (*_ROUNDING, "ftz", "approx"))
    if parsed is None or form.type not in ("f32", "f64") or not form.has(1, 1, *form.flags):
        return None
    ways = _ROUNDING if form.opcode != "rsqrt" else ()
    if not _one_of(form, *ways, *(("approx",) if form.type == "f32" or form.opcode == "rsqrt" else ())):
        return None
    mode, ftz, *_ = parsed
    kind = numpy_type(form.type)
    (a,) = operands(form.type, 1, ftz)
    if form.opcode == "rsqrt":
        value = f"inverse_root({a})"
    elif form.opcode == "rcp":
        one = form.constant(1.0, kind)
        value = f"{one} / {a}" if mode == "rn" else f"directed_{kind}('div', '{mode}', {one}, {a})"
    else:
        value = f"sqrt({a})" if mode == "rn" else f"directed_{kind}('sqrt', '{mode}', {a})"
    return form.rule((kind,), (kind,), finished(form.type, value, ftz, False, False))


def _approximate(form: Form) -> Rule | None:
    """The value in double precision, rounded once more."""
    parsed = _flags(form, ("approx", "ftz"))
    if parsed is None or form.type == "f64" or "approx" not in form.flags or not form.has(1, 1, *form.flags):
        return None
    if form.type in ("f16", "bf16") and form.opcode not in ("ex2", "tanh"):
        return None
    kind, ftz = numpy_type(form.type), parsed[1]
    (a,) = operands(form.type, 1, ftz)
    value = f"{_FUNCTION[form.opcode]}({a}.astype(f8)).astype(f4)"
    return form.rule((kind,), (kind,), finished(form.type, value, ftz, False, False))


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
    # The functions give the canonical NaN of a float.
    if form.type in ("f16", "bf16"):
        value = finished(form.type, value, ftz, False, False)
    return form.rule((kind,) * count, (kind,), value)


@function
def with_sign(value: Any, a: Any, b: Any) -> Any:
    """The sign is the product of the signs, also of a NaN's."""
    sign = (a.view(np.uint32) ^ b.view(np.uint32)) & np.uint32(1 << 31)
    return (value.view(np.uint32) | sign).view(np.float32)


def _sign(form: Form) -> Rule | None:
    """Only the sign bit changes, also of a NaN."""
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
    directed_f8=directed_f8,
    flushed_f4=_flush("f4", 2.0**-126),
    flushed_f2=_flush("f2", 2.0**-14),
    flushed_f16=_flush("f4", 2.0**-14),
)


@function
def to_flushed_f16(x: Any) -> Any:
    return FUNCTIONS["flushed_f2"](FUNCTIONS["to_f16"](x))


@function
def unit_range(x: Any) -> Any:
    """Not below 0, not above 1; a NaN is +0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


@function
def rectified(x: Any) -> Any:
    """A negative number is +0; a NaN stays one."""
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


_FORM = FORMATS["f32"]


@function
def directed_f4(name: str, mode: str, *inputs: Any) -> Any:
    """A float operation in a directed mode, by way of a double that decides the rounding."""
    first, *rest = (x.astype(np.float64) for x in inputs)
    if name == "fma":
        first, rest = first * rest[0], rest[1:]
    if name in ("add", "sub", "fma"):
        other = -rest[0] if name == "sub" else rest[0]
        exact = odd_sum(first, other)
        if mode == "rm":
            both_positive = ~np.signbit(first) & ~np.signbit(other)
            exact = np.where((exact == 0) & ~both_positive, -0.0, exact)
    else:
        exact = {"mul": lambda: first * rest[0], "div": lambda: first / rest[0], "sqrt": lambda: np.sqrt(first)}[name]()
    return canonical_f4(rounded(exact, _FORM, mode).astype(np.float32))


_RULES = {
    "add": _binary, "sub": _binary, "mul": _binary, "fma": _fused, "mad": _fused, "div": _quotient, "sqrt": _root,
    "rcp": _root, "rsqrt": _root, "ex2": _approximate, "lg2": _approximate, "sin": _approximate, "cos": _approximate,
    "tanh": _approximate, "min": _extreme, "max": _extreme, "neg": _sign, "abs": _sign, "copysign": _copysign,
}  # fmt: skip
