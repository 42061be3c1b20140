"""Two numbers in one register: .s16x2 and .u16x2, .f16x2 and .bf16x2, .f32x2."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic import floating
from tricomm.explorer.ptx.arithmetic.form import Form, Rule
from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS, function

_WORD = {"s16x2": "u4", "u16x2": "u4", "f16x2": "u4", "bf16x2": "u4", "f32x2": "u8"}


def rule(form: Form) -> Rule | None:
    """The rule of a packed instruction: the rule for one part, applied to arrays with two elements per lane."""
    if len(form.types) != 1 or form.type not in _WORD:
        return None
    kind = form.type.removesuffix("x2")
    if kind in ("s16", "u16"):
        make = _INTEGER.get(form.opcode)
        return make(form) if make is not None else None
    made = floating.rule(form.of_type(kind)) if form.opcode in _FLOAT[kind] else None
    if made is not None and form.opcode in ("neg", "abs"):
        return _sign(form)
    # A constant would have one number per lane, but here each lane has two.
    return _spread(form, made.template, made.inputs[0]) if made is not None and not made.constants else None


def _spread(form: Form, template: str, part: str) -> Rule:
    word = _WORD[form.type]
    return form.rule((word,) * len(form.sources), (word,), _by_parts(form, template, part))


def _by_parts(form: Form, template: str, part: str) -> str:
    places = range(len(form.sources))
    names = [f"x{i}" for i in places]
    joined = ", ".join(f"{{{i}}}" for i in places)
    return f"by_parts(lambda {', '.join(names)}: {template.format(*names)}, {part}, {_WORD[form.type]}, {joined})"


def _sign(form: Form) -> Rule:
    """`neg` and `abs` of both halves at once."""
    value = "{0}" if "ftz" not in form.flags else _by_parts(form, "flushed_f2({0})", "f2")
    if form.opcode == "neg":
        return form.rule(("u4",), ("u4",), f"{value} ^ {form.constant(0x80008000, 'u4')}")
    return form.rule(("u4",), ("u4",), f"{value} & {form.constant(0x7FFF7FFF, 'u4')}")


@function
def by_parts(operation: Any, part: Any, word: Any, a: Any, *others: Any) -> Any:
    """Apply the operation to arrays with two elements per lane."""
    shape = a.shape
    if shape:
        if len(others) == 1 and others[0].shape == shape:
            return operation(a.view(part), others[0].view(part)).view(word)
        if all(x.shape == shape for x in others):
            return operation(a.view(part), *(x.view(part) for x in others)).view(word)
    shape = np.broadcast_shapes(shape, *(x.shape for x in others))
    spread = (np.ascontiguousarray(np.broadcast_to(x, shape or (1,))).view(part) for x in (a, *others))
    result = operation(*spread).view(word)
    return result if shape else result[0]


def _add(form: Form) -> Rule | None:
    return _spread(form, "{0} + {1}", "u2") if form.has(1, 2) else None


def _extreme(form: Form) -> Rule | None:
    name, part = f"{form.opcode}imum", "i2" if form.type == "s16x2" else "u2"
    if form.has(1, 2):
        return _spread(form, f"{name}({{0}}, {{1}})", part)
    if form.has(1, 2, "relu") and form.type == "s16x2":
        return _spread(form, f"maximum({name}({{0}}, {{1}}), i2_zero)", part)
    return None


FUNCTIONS["i2_zero"] = np.array(0, "i2")

_INTEGER = {"add": _add, "min": _extreme, "max": _extreme}
_HALF = ("add", "sub", "mul", "fma", "min", "max", "neg", "abs", "ex2", "tanh")
_FLOAT = {"f16": _HALF, "bf16": _HALF, "f32": ("add", "sub", "mul", "fma")}
