"""cvt between integers and floats of every width and rounding."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, Rule, numpy_type, width
from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS, function
from tricomm.explorer.ptx.arithmetic.rounding import odd_sum
from tricomm.explorer.ptx.instructions import Register

_INTEGER = re.compile(r"[us](8|16|32|64)")
_FLOAT = ("f16", "bf16", "f32", "f64")
_TO_INTEGER = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_TO_FLOAT = ("rn", "rz", "rm", "rp")
_MODIFIERS = (*_TO_INTEGER, *_TO_FLOAT, "ftz", "sat", "satfinite", "relu")
FUNCTIONS.update({name: getattr(np, name) for name in _TO_INTEGER.values()})


def rule(form: Form) -> Rule | None:
    if form.opcode != "cvt" or len(form.types) != 2 or set(form.flags) - set(_MODIFIERS):
        return None
    modes = [flag for flag in form.flags if flag in (*_TO_INTEGER, *_TO_FLOAT)]
    if len(modes) > 1 or not form.has(1, 1, *form.flags):
        return None
    mode = modes[0] if modes else ""
    rest = set(form.flags) - {mode}
    to, of = form.types
    to_integer, of_integer = bool(_INTEGER.fullmatch(to)), bool(_INTEGER.fullmatch(of))
    if to_integer and of_integer:
        return _between_integers(form, to, of) if not form.flags else None
    if to_integer and of in _FLOAT:
        allowed = mode in _TO_INTEGER and rest <= {"ftz", "sat"}
        return _to_integer(form, mode, "ftz" in rest) if allowed else None
    if of_integer and to in _FLOAT:
        return _from_integer(form) if form.flags == ("rn",) else None
    if to in _FLOAT and of in _FLOAT:
        return _between_floats(form, mode, rest)
    return None


def _source(form: Form) -> tuple[str, str]:
    """(input type, expression of the source's own type): a register may be wider than the converted value."""
    kind, source = form.types[1], form.sources[0]
    own = numpy_type(kind)
    if isinstance(source, Register) and source.kind != "pred" and width(source.kind) > width(kind):
        word = f"u{width(source.kind) // 8}"
        narrow = f"{{0}}.astype({own})" if own[0] in "iu" else f"{{0}}.astype(u{own[1]}).view({own})"
        return word, narrow
    return own, "{0}"


def _result(form: Form, value: str) -> tuple[str, str]:
    """(output type, expression): a wider destination takes the sign- or zero-extended value."""
    kind, destination = form.types[0], form.destinations[0]
    own = numpy_type(kind)
    if isinstance(destination, Register) and destination.kind != "pred" and width(destination.kind) > width(kind):
        if own[0] in "iu":
            wide = f"{own[0]}{width(destination.kind) // 8}"
            return wide, f"{value}.astype({wide})"
    return own, value


def _between_integers(form: Form, to: str, of: str) -> Rule:
    kind, value = _source(form)
    target = numpy_type(to)
    if width(to) <= width(of):
        # Only the low bits are used.
        same = target[1] == kind[1]
        value = f"{{0}}.view({target})" if same and target != kind else f"{{0}}.astype({target})" if not same else "{0}"
    elif numpy_type(of) != target:
        value = f"{value}.astype({target})"
    if target == kind and value == "{0}":
        return (
            form.rule((kind,), (kind,), "{0}")
            if _result(form, value)[0] == kind
            else form.rule((kind,), *_outputs(form, value))
        )
    return form.rule((kind,), *_outputs(form, value))


def _outputs(form: Form, value: str) -> tuple[tuple[str, ...], str]:
    kind, expression = _result(form, value)
    return (kind,), expression


def _decoded(kind: str, value: str) -> str:
    return f"from_bf16({value})" if kind == "bf16" else value


def _to_integer(form: Form, mode: str, ftz: bool) -> Rule | None:
    to, of = form.types
    kind, value = _source(form)
    if ftz and of != "f32":
        return None
    value = _decoded(of, value)
    if ftz:
        value = f"flushed_f4({value})"
    wide = of == "f64" or width(to) == 64
    target = numpy_type(to)
    invalid = form.constant(1 << width(to) - 1 if wide else 0, target)
    call = f"as_integer({_TO_INTEGER[mode]}({value}.astype(f8)), {target}, {invalid})"
    return form.rule((kind,), *_outputs(form, call))


@function
def as_integer(x: Any, dtype: Any, invalid: Any) -> Any:
    """Doubles with integer values, converted to `dtype` and clamped to its range. NaN becomes `invalid`."""
    bounds = np.iinfo(dtype)
    low, high = float(bounds.min), float(bounds.max)
    # The largest 64-bit integers are not doubles; the bound is the next power of two.
    inside = (x >= low) & ((x < high) if dtype.itemsize == 8 else (x <= high))
    result = np.where(inside, x, 0.0).astype(dtype)
    if inside.all():
        return result
    clamped = np.where(x < 0, dtype.type(bounds.min), dtype.type(bounds.max))
    return np.where(inside, result, np.where(x == x, clamped, invalid))


def _from_integer(form: Form) -> Rule | None:
    to, (kind, value) = form.types[0], _source(form)
    output = numpy_type(to)
    if to in ("f32", "f64"):
        return form.rule((kind,), (output,), f"{value}.astype({output})")
    return form.rule((kind,), (output,), f"narrowed(odd_double({value}), '{to}', 'rn').view({output})")


@function
def odd_double(x: Any) -> Any:
    """Integers as doubles, rounded to odd. So rounding the result again, to a shorter type, gives the nearest value."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64)
    low = x & x.dtype.type(0xFFFFFFFF)
    return odd_sum((x - low).astype(np.float64), low.astype(np.float64))


def _between_floats(form: Form, mode: str, rest: set[str]) -> Rule | None:
    to, of = form.types
    kind, value = _source(form)
    if not isinstance(form.destinations[0], Register) and form.destinations[0] is not None:
        return None
    output = numpy_type(to)
    if (to, of, mode) == ("bf16", "f16", ""):
        mode = "rn"  # ptxas accepts no mode here. Triton gives one for values that were e4m3, which bf16 holds exactly.
    ftz, sat, finite, relu = (name in rest for name in ("ftz", "sat", "satfinite", "relu"))
    if ftz and "f32" not in (to, of) or finite and to not in ("f16", "bf16"):
        return None
    if (finite or relu) and (of != "f32" or sat):
        return None
    if mode in _TO_INTEGER and to != of:
        return None
    narrower = _DIGITS[to] < _DIGITS[of] or to == "f16" and of == "bf16"
    if narrower != (mode in _TO_FLOAT) and not (mode in _TO_INTEGER and to == of):
        return None
    value = _decoded(of, value)
    if ftz and of == "f32":
        value = f"flushed_f4({value})"
    if mode in _TO_INTEGER:
        value = _integral(to, f"{_TO_INTEGER[mode]}({value if to != 'f16' else value + '.astype(f4)'})")
    elif not narrower:
        value = _widened(to, of, value, "{0}" if to == of and not (ftz or sat) else "")
    elif mode == "rn" and not (finite or relu) and (to, of) in _QUICK:
        value = _QUICK[to, of].format(value)
    else:
        value = f"narrowed({value}, '{to}', '{mode}', {finite}, {relu}).view({output})"
    if ftz and to == "f32" and of != "f32":
        value = f"flushed_f4({value})"
    if sat:
        value = _half(to, f"unit_range({_decoded(to, value)})") if to == "bf16" else f"unit_range({value})"
    return form.rule((kind,), (output,), value)


_DIGITS = {"bf16": 7, "f16": 10, "f32": 23, "f64": 52}
_QUICK = {
    ("f16", "f32"): "to_f16({0})",
    ("bf16", "f32"): "to_bf16({0})",
    ("f32", "f64"): "canonical_f4({0}.astype(f4))",
    ("bf16", "f16"): "to_bf16({0}.astype(f4))",
    ("f16", "bf16"): "to_f16({0})",
}


def _half(kind: str, value: str) -> str:
    return f"to_bf16({value})" if kind == "bf16" else value


def _integral(kind: str, value: str) -> str:
    return {"f16": f"to_f16({value})", "bf16": f"to_bf16({value})", "f32": f"canonical_f4({value})"}.get(kind, value)


def _widened(to: str, of: str, value: str, same: str) -> str:
    """An exact conversion. If `value` was bf16, it is a float already."""
    if same:
        return same
    if to == of:
        return _half(to, value)
    if to == "f32" and of == "bf16":
        return value
    wider = f"{value}.astype({numpy_type(to)})"
    # The hardware makes every NaN canonical when it converts a half.
    return f"canonical_f4({wider})" if (to, of) == ("f32", "f16") else wider
