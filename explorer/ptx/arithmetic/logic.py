"""Bitwise operations, shifts, the three-input look-up table, and counting bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, Rule, numpy_type, width
from tricomm.explorer.ptx.arithmetic.functions import function

_SYMBOL = {"and": "&", "or": "|", "xor": "^"}


def rule(form: Form) -> Rule | None:
    make = _RULES.get(form.opcode)
    return make(form) if make is not None and len(form.types) == 1 else None


def _bitwise(form: Form) -> Rule | None:
    if form.type not in ("pred", "b16", "b32", "b64"):
        return None
    kind = numpy_type(form.type)
    either = None if form.type == "pred" else kind
    if form.opcode == "not":
        return form.rule((kind,), (kind,), "~{0}", either) if form.has(1, 1) else None
    if not form.has(1, 2):
        return None
    return form.rule((kind,) * 2, (kind,), f"{{0}} {_SYMBOL[form.opcode]} {{1}}", either)


def _shift(form: Form) -> Rule | None:
    """Shifts. A shift by the width or more gives 0 or the sign in numpy, as in PTX."""
    left = form.opcode == "shl"
    if form.type not in (
        ("b16", "b32", "b64") if left else ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
    ):
        return None
    if not form.has(1, 2):
        return None
    kind, bits, amount, symbol = numpy_type(form.type), width(form.type), form.value(1), "<<" if left else ">>"
    if amount is not None and 0 <= amount < bits:
        return form.rule((kind,) * 2, (kind,), f"{{0}} {symbol} {{1}}", either=kind if left else None)
    if bits == 64:
        return form.rule((kind, "u4"), (kind,), f"{{0}} {symbol} {{1}}.astype({kind})")
    wide = f"{kind[0]}4"
    if bits == 32:
        return form.rule((kind, wide), (kind,), f"{{0}} {symbol} {{1}}")
    return form.rule((kind, wide), (kind,), f"({{0}}.astype({wide}) {symbol} {{1}}).astype({kind})")


def _funnel(form: Form) -> Rule | None:
    if form.type != "b32" or form.flags not in (("l", "clamp"), ("l", "wrap"), ("r", "clamp"), ("r", "wrap")):
        return None
    if not form.has(1, 3, *form.flags):
        return None
    direction, mode = form.flags
    amount = form.value(2)
    if amount is not None:
        amount &= 0xFFFFFFFF
        amount = min(amount, 32) if mode == "clamp" else amount & 31
        up, down = (amount, 32 - amount) if direction == "l" else (32 - amount, amount)
        if up in (0, 32):
            return form.rule(("u4",) * 3, ("u4",), "{1}" if up == 0 else "{0}")
        template = f"({{1}} << {form.constant(up, 'u4')}) | ({{0}} >> {form.constant(down, 'u4')})"
        return form.rule(("u4",) * 3, ("u4",), template)
    if mode == "wrap":
        clamped = f"{{2}} & {form.constant(31, 'u4')}"
    else:
        clamped = f"minimum({{2}}, {form.constant(32, 'u4')})"
    name = "funnel_left" if direction == "l" else "funnel_right"
    return form.rule(("u4",) * 3, ("u4",), f"{name}({{0}}, {{1}}, {clamped})")


_WIDTH = np.uint32(32)


@function
def funnel_left(low: Any, high: Any, amount: Any) -> Any:
    return (high << amount) | (low >> (_WIDTH - amount))


@function
def funnel_right(low: Any, high: Any, amount: Any) -> Any:
    return (high << (_WIDTH - amount)) | (low >> amount)


# Tables of two inputs: bit 3 is the result for (1, 1), bit 2 for (1, 0), bit 1 for (0, 1), bit 0 for (0, 0).
_OF_TWO = {
    1: "~({x} | {y})",
    2: "(~{x} & {y})",
    3: "~{x}",
    4: "({x} & ~{y})",
    5: "~{y}",
    6: "({x} ^ {y})",
    7: "~({x} & {y})",
    8: "({x} & {y})",
    9: "~({x} ^ {y})",
    10: "{y}",
    11: "(~{x} | {y})",
    12: "{x}",
    13: "({x} | ~{y})",
    14: "({x} | {y})",
}


def table_expression(table: int) -> str:
    """An expression of `{0}`, `{1}`, `{2}` whose result for the input bits (a, b, c) is bit 4a+2b+c of `table`."""
    with_a, without_a = table >> 4, table & 15
    high, low = (_OF_TWO.get(part, "").format(x="{1}", y="{2}") for part in (with_a, without_a))
    if with_a == without_a:
        return high or ("{0} & ~{0}" if with_a == 0 else "{0} | ~{0}")
    if with_a == 15 - without_a:
        return "{0}" if with_a == 15 else "~{0}" if with_a == 0 else f"{{0}} ^ {low}"
    if with_a in (0, 15):
        return f"~{{0}} & {low}" if with_a == 0 else f"{{0}} | {low}"
    if without_a in (0, 15):
        return f"{{0}} & {high}" if without_a == 0 else f"~{{0}} | {high}"
    return f"({{0}} & {high}) | (~{{0}} & {low})"


def _lop3(form: Form) -> Rule | None:
    table = form.value(3) if len(form.sources) >= 4 else None
    if form.type != "b32" or table is None or not 0 <= table < 256:
        return None
    expression = table_expression(table)
    if form.has(1, 4):
        return form.rule(("u4",) * 4, ("u4",), expression)
    return None


def _count(form: Form) -> Rule | None:
    """popc, clz and brev."""
    if form.types not in (("b32",), ("b64",)) or not form.has(1, 1):
        return None
    kind = numpy_type(form.type)
    name = {"popc": "bits_set", "clz": "leading_zeros", "brev": "bits_reversed"}[form.opcode]
    return form.rule((kind,), (kind if form.opcode == "brev" else "u4",), f"{name}({{0}})")


@function
def bits_set(x: Any) -> Any:
    """The number of bits that are set, summed up by pairs, nibbles and bytes."""
    kind, bits = x.dtype.type, x.dtype.itemsize * 8
    ones = (1 << bits) - 1
    x = x - ((x >> kind(1)) & kind(ones // 3))
    x = (x & kind(ones // 5)) + ((x >> kind(2)) & kind(ones // 5))
    x = (x + (x >> kind(4))) & kind(ones // 17)
    return ((x * kind(ones // 255)) >> kind(bits - 8)).astype(np.uint32)


def _spread_down(x: Any) -> Any:
    """`x` with all bits set below its highest set bit."""
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
        # Swap neighbouring groups of `shift` bits.
        low = kind(ones // ((1 << shift) + 1))
        x = ((x >> kind(shift)) & low) | ((x & low) << kind(shift))
        shift //= 2
    return x


_RULES = {
    "and": _bitwise,
    "or": _bitwise,
    "xor": _bitwise,
    "not": _bitwise,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "lop3": _lop3,
    "popc": _count,
    "clz": _count,
    "brev": _count,
}
