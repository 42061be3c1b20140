"""mov, which may also pack and unpack."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, Rule, numpy_type, width
from tricomm.explorer.ptx.arithmetic.functions import function

_MOVED = ("pred", "b16", "b32", "b64", "b128", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16", "bf16")


def rule(form: Form) -> Rule | None:
    if form.opcode != "mov" or form.types not in {(kind,) for kind in _MOVED}:
        return None
    kind = numpy_type(form.type)
    word = f"u{kind[1:]}" if kind[0] == "i" else kind
    if form.flags:
        return _vector(form, word)
    if form.packs:
        return _pack(form, word) if form.type[0] == "b" and len(form.destinations) == 1 else None
    if form.unpacks:
        return _unpack(form, word) if form.type[0] == "b" and len(form.sources) == 1 else None
    if not form.has(1, 1):
        return None
    return form.rule((word,), (word,), "{0}", either=word if word[0] == "u" else None)


def _vector(form: Form, word: str) -> Rule | None:
    """`mov.v4.b32 %v, %w`, or one source for all elements."""
    count, sources = len(form.destinations), len(form.sources)
    if form.flags not in (("v2",), ("v4",)) or f"v{count}" != form.flags[0] or sources not in (1, count):
        return None
    moved = ", ".join(f"{{{i % sources}}}" for i in range(count))
    return form.rule((word,) * sources, (word,) * count, f"({moved})")


def _part(form: Form, count: int) -> str | None:
    bits = width(form.type) // count
    return f"u{bits // 8}" if bits * count == width(form.type) and bits in (8, 16, 32, 64) else None


def _pack(form: Form, word: str) -> Rule | None:
    count = len(form.sources)
    part = _part(form, count)
    if part is None or count not in (2, 4):
        return None
    parts = ", ".join(f"{{{i}}}" for i in range(count))
    if word == "V16" or count == 4:
        return form.rule((part,) * count, (word,), f"packed({word}, {parts})")
    shift = form.constant(width(form.type) // 2, word)
    return form.rule((part,) * 2, (word,), f"{{0}}.astype({word}) | ({{1}}.astype({word}) << {shift})")


def _unpack(form: Form, word: str) -> Rule | None:
    count = len(form.destinations)
    part = _part(form, count)
    if part is None or count not in (2, 4):
        return None
    if word == "V16" or count == 4:
        return form.rule((word,), (part,) * count, f"unpacked({{0}}, {part})")
    low, high = form.destinations
    first = f"{{0}}.astype({part})" if low is not None else "None"
    second = "None"
    if high is not None:
        second = f"({{0}} >> {form.constant(width(form.type) // 2, word)}).astype({part})"
    return form.rule((word,), (part,) * 2, f"({first}, {second})")


@function
def packed(dtype: Any, *parts: Any) -> Any:
    return np.stack(np.broadcast_arrays(*parts), axis=-1).view(dtype)[..., 0]


@function
def unpacked(value: Any, part: Any) -> tuple[Any, ...]:
    parts = np.atleast_1d(value).view(part).reshape(*np.shape(value), -1)
    return tuple(np.ascontiguousarray(parts[..., i]) if parts.ndim > 1 else parts[i] for i in range(parts.shape[-1]))
