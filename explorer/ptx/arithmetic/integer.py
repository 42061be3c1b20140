"""Integer arithmetic: the low, high or wide product, division, minimum, and sums with a carry flag."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, Rule, numpy_type, width
from tricomm.explorer.ptx.arithmetic.functions import function

_TYPES = ("u16", "u32", "u64", "s16", "s32", "s64")
_SIGNED = ("s16", "s32", "s64")


def rule(form: Form) -> Rule | None:
    """The rule of an instruction of integer arithmetic; None for others and for unknown forms."""
    make = _RULES.get(form.opcode)
    if make is None or len(form.types) != 1 or form.type not in _TYPES:
        return None
    return make(form)


def _word(form: Form) -> str:
    """The unsigned numpy type of the instruction's type."""
    return f"u{width(form.type) // 8}"


def _sum(form: Form) -> Rule | None:
    word, sign = _word(form), "+" if form.opcode == "add" else "-"
    if form.has(1, 2):
        return form.rule((word,) * 2, (word,), f"{{0}} {sign} {{1}}", either=word)
    if form.has(1, 2, "sat") and form.type == "s32":
        return form.rule(("i4", "i4"), ("i4",), f"saturated({{0}}.astype(i8) {sign} {{1}})")
    if form.has(2, 2, "cc") and word != "u2":
        return form.rule((word,) * 2, (word, "?"), f"{form.opcode}_out({{0}}, {{1}})")
    return None


def _sum_with_carry(form: Form) -> Rule | None:
    word, name = _word(form), form.opcode
    if word == "u2":
        return None
    if form.has(1, 3):
        sign = "+" if name == "addc" else "-"
        template = f"{{0}} {sign} {{1}} {sign} {{2}}.astype({word})"
        return form.rule((word, word, "?"), (word,), template)
    if form.has(2, 3, "cc"):
        return form.rule((word, word, "?"), (word, "?"), f"{name}_out({{0}}, {{1}}, {{2}})")
    return None


@function
def saturated(value: Any) -> Any:
    return np.clip(value, -(1 << 31), (1 << 31) - 1).astype(np.int32)


@function
def add_out(a: Any, b: Any) -> tuple[Any, Any]:
    total = a + b
    return total, total < a


@function
def sub_out(a: Any, b: Any) -> tuple[Any, Any]:
    return a - b, a < b


@function
def addc_out(a: Any, b: Any, carry: Any) -> tuple[Any, Any]:
    partial = a + b
    total = partial + carry.astype(partial.dtype)
    return total, (partial < a) | (total < partial)


@function
def subc_out(a: Any, b: Any, borrow: Any) -> tuple[Any, Any]:
    partial = a - b
    total = partial - borrow.astype(partial.dtype)
    return total, (a < b) | (partial < total)


def _product(form: Form, mode: str) -> tuple[str, tuple[str, str], str]:
    """(expression, inputs, output) of `{0}` times `{1}`."""
    kind, bits = numpy_type(form.type), width(form.type)
    if mode == "lo":
        return "{0} * {1}", (_word(form),) * 2, _word(form)
    if bits == 64:
        return "high_product({0}, {1})", (kind, kind), kind
    double = f"{kind[0]}{bits // 4}"
    inputs, factors = [], []
    for index in (0, 1):
        literal = form.value(index) is not None
        # A literal is created in the wide type, but wraps around as in its own.
        inputs.append(double if literal and _in_range(form, index) else kind)
        factors.append(f"{{{index}}}" if inputs[-1] == double else f"{{{index}}}.astype({double})")
    wide = " * ".join(factors)
    if mode == "wide":
        return wide, (inputs[0], inputs[1]), double
    return f"({wide} >> {form.constant(bits, double)}).astype({kind})", (inputs[0], inputs[1]), kind


def _in_range(form: Form, index: int) -> bool:
    value, bits = form.value(index), width(form.type)
    low, high = (-(1 << bits - 1), 1 << bits - 1) if form.type in _SIGNED else (0, 1 << bits)
    return value is not None and low <= value < high


def _mul(form: Form) -> Rule | None:
    if (
        not form.has(1, 2, "lo", "hi", "wide")
        or len(form.flags) != 1
        or form.flags[0] == "wide"
        and width(form.type) == 64
    ):
        return None
    product = _product(form, form.flags[0])
    if product is None:
        return None
    template, inputs, output = product
    return form.rule(inputs, (output,), template, either=output if form.flags[0] == "lo" else None)


def _mad(form: Form) -> Rule | None:
    mode = next((flag for flag in form.flags if flag in ("lo", "hi", "wide")), "")
    rest = tuple(flag for flag in form.flags if flag != mode)
    carry_in = form.opcode == "madc"
    if not mode or mode == "wide" and (width(form.type) == 64 or rest or carry_in):
        return None
    count = 4 if carry_in else 3
    if not (form.has(1, count, mode) and not rest or form.has(2, count, mode, "cc") and rest == ("cc",)):
        return None
    template, inputs, output = _product(form, mode)
    if not rest and not carry_in:
        return form.rule((*inputs, output), (output,), f"{template} + {{2}}", either=output if mode == "lo" else None)
    word = _word(form)
    if word == "u2":
        return None
    first = f"({template}).view({word})" if output != word else f"({template})"
    kinds = (*inputs, word, "?") if carry_in else (*inputs, word)
    if rest:
        call = f"addc_out({first}, {{2}}, {{3}})" if carry_in else f"add_out({first}, {{2}})"
        return form.rule(kinds, (word, "?"), call)
    return form.rule(kinds, (word,), f"{first} + {{2}} + {{3}}.astype({word})")


_LOW, _HALF = {}, {}
for _kind in ("i8", "u8"):
    _LOW[_kind[0]], _HALF[_kind[0]] = np.array(0xFFFFFFFF, _kind), np.array(32, _kind)


@function
def high_product(a: Any, b: Any) -> Any:
    """The high 64 bits of a product of 64-bit numbers, computed by halves. The upper halves have the sign."""
    kind = a.dtype.kind
    ones, half = _LOW[kind], _HALF[kind]
    a_low, a_high, b_low, b_high = a & ones, a >> half, b & ones, b >> half
    low = a_low * b_low
    # The carry of the unsigned product of the lower halves.
    carried = (low >> half) & ones
    middle = a_high * b_low
    middle += carried
    other = a_low * b_high
    other += middle & ones
    result = a_high * b_high
    result += middle >> half
    result += other >> half
    return result


def _div(form: Form) -> Rule | None:
    if not form.has(1, 2):
        return None
    kind, divisor = numpy_type(form.type), form.value(1)
    known = divisor is not None and _in_range(form, 1) and divisor > 0
    if form.opcode == "rem":
        return form.rule((kind,) * 2, (kind,), "fmod({0}, {1})" if known else "remainder({0}, {1})")
    if kind[0] == "u":
        return form.rule((kind,) * 2, (kind,), "{0} // {1}" if known else "unsigned_quotient({0}, {1})")
    return form.rule((kind,) * 2, (kind,), "signed_quotient({0}, {1})")


_nonzero = np.count_nonzero


@function
def unsigned_quotient(a: Any, b: Any) -> Any:
    """The quotient of unsigned integers. Division by zero, which PTX leaves open, returns all ones."""
    quotient = a // b
    return quotient if _nonzero(b) == b.size else np.where(b == 0, ~np.zeros((), a.dtype), quotient)


@function
def signed_quotient(a: Any, b: Any) -> Any:
    """The quotient, rounded towards zero. Division by zero, which PTX leaves open, returns all ones."""
    quotient = (a - np.fmod(a, b)) // b
    return quotient if _nonzero(b) == b.size else np.where(b == 0, ~np.zeros((), a.dtype), quotient)


@function
def remainder(a: Any, b: Any) -> Any:
    """The remainder, with the sign of the dividend. Division by zero, which PTX leaves open, returns the dividend."""
    rest = np.fmod(a, b)
    return rest if _nonzero(b) == b.size else np.where(b == 0, a, rest)


def _min(form: Form) -> Rule | None:
    name, kind = f"{form.opcode}imum", numpy_type(form.type)
    if form.has(1, 2):
        return form.rule((kind,) * 2, (kind,), f"{name}({{0}}, {{1}})")
    if form.has(1, 2, "relu") and form.type == "s32":
        return form.rule((kind,) * 2, (kind,), f"maximum({name}({{0}}, {{1}}), {form.constant(0, kind)})")
    return None


def _one(form: Form) -> Rule | None:
    if not form.has(1, 1) or form.type not in _SIGNED:
        return None
    kind, word = numpy_type(form.type), _word(form)
    if form.opcode == "neg":
        return form.rule((word,), (word,), "-{0}", either=word)
    return form.rule((kind,), (kind,), "absolute({0})")


_RULES = {
    "add": _sum,
    "sub": _sum,
    "addc": _sum_with_carry,
    "subc": _sum_with_carry,
    "mul": _mul,
    "mad": _mad,
    "madc": _mad,
    "div": _div,
    "rem": _div,
    "min": _min,
    "max": _min,
    "neg": _one,
    "abs": _one,
}
