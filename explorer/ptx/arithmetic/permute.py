"""Bytes and bit fields: prmt, bfe, bfi."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.arithmetic.form import Form, Rule, numpy_type, width
from tricomm.explorer.ptx.arithmetic.functions import function


def rule(form: Form) -> Rule | None:
    make = _RULES.get(form.opcode)
    return make(form) if make is not None and len(form.types) == 1 else None


def _prmt(form: Form) -> Rule | None:
    if form.type != "b32" or not form.has(1, 3):
        return None
    selector = form.value(2)
    if selector is None:
        return form.rule(("u4",) * 3, ("u4",), "permuted({0}, {1}, {2})")
    return form.rule(("u4",) * 3, ("u4",), permutation(form, selector & 0xFFFF))


def permutation(form: Form, selector: int) -> str:
    """The bytes that `selector` picks, by one mask and one shift for all bytes of a source that move equally far."""
    moves: dict[tuple[int, int], int] = {}
    terms = []
    for place in range(4):
        picked = selector >> 4 * place & 15
        source, byte = picked >> 2 & 1, picked & 3
        if form.value(source) == 0:
            continue
        if picked & 8:
            sign = f"({{{source}}} << {form.constant(24 - 8 * byte, 'u4')})" if byte < 3 else f"{{{source}}}"
            spread = f"({sign}.view(i4) >> {form.constant(31, 'i4')}).view(u4)"
            terms.append(f"({spread} & {form.constant(0xFF << 8 * place, 'u4')})")
        else:
            move = (source, 8 * (place - byte))
            moves[move] = moves.get(move, 0) | 0xFF << 8 * place
    for (source, shift), mask in moves.items():
        term = f"{{{source}}}"
        whole = 0xFFFFFFFF
        if shift:
            term = f"({term} {'<<' if shift > 0 else '>>'} {form.constant(abs(shift), 'u4')})"
            whole = (whole << shift if shift > 0 else whole >> -shift) & 0xFFFFFFFF
        terms.append(term if mask == whole else f"({term} & {form.constant(mask, 'u4')})")
    return " | ".join(terms) if terms else "{0} & " + form.constant(0, "u4")


_EIGHT = np.uint64(8)


@function
def permuted(a: Any, b: Any, selector: Any) -> Any:
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.uint32(0)
    for place in range(4):
        picked = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = ((both >> ((picked & np.uint32(7)).astype(np.uint64) * _EIGHT)) & np.uint64(255)).astype(np.uint32)
        spread = (byte >> np.uint32(7)) * np.uint32(255)
        result = result | (np.where(picked & np.uint32(8), spread, byte) << np.uint32(8 * place))
    return result


def _bfe(form: Form) -> Rule | None:
    if form.type not in ("u32", "u64", "s32", "s64") or not form.has(1, 3):
        return None
    kind, bits = numpy_type(form.type), width(form.type)
    start, length = form.value(1), form.value(2)
    signed = kind[0] == "i"
    if start is None or length is None or not (0 <= start < bits and 0 < length and start + length <= bits):
        return form.rule((kind, "u4", "u4"), (kind,), f"extracted_field({{0}}, {{1}}, {{2}}, {signed})")
    inputs = (kind, "u4", "u4")
    left, above = bits - length, bits - start - length
    if signed:
        term = f"({{0}} << {form.constant(above, kind)})" if above else "{0}"
        return form.rule(inputs, (kind,), f"{term} >> {form.constant(left, kind)}" if left else "{0}")
    term = f"({{0}} >> {form.constant(start, kind)})" if start else "{0}"
    return form.rule(inputs, (kind,), f"{term} & {form.constant((1 << length) - 1, kind)}" if above else term)


@function
def extracted_field(a: Any, start: Any, length: Any, signed: bool) -> Any:
    kind = a.dtype.type
    bits = a.dtype.itemsize * 8
    position, count = ((x & np.uint32(0xFF)).astype(np.int64) for x in (start, length))
    last = np.minimum(position + count - 1, bits - 1)
    # Shift the field's last bit to the top and down again, because the right shift copies the sign.
    up, low = (bits - 1 - np.maximum(last, 0)).astype(kind), np.minimum(position, bits - 1)
    taken = np.where(position < bits, last - low + 1, 1)
    field = (a << up) >> (bits - np.maximum(taken, 1)).astype(kind)
    if not signed:
        field = np.where(position < bits, field, kind(0))
    return np.where(count == 0, kind(0), field)


def _bfi(form: Form) -> Rule | None:
    if form.type not in ("b32", "b64") or not form.has(1, 4):
        return None
    kind, bits = numpy_type(form.type), width(form.type)
    start, length = form.value(2), form.value(3)
    inputs = (kind, kind, "u4", "u4")
    if start is None or length is None or not (0 <= start < bits and 0 < length and start + length <= bits):
        return form.rule(inputs, (kind,), "inserted_field({0}, {1}, {2}, {3})")
    mask = (1 << length) - 1 << start
    if mask == (1 << bits) - 1:
        return form.rule(inputs, (kind,), "{0}")
    moved = f"({{0}} << {form.constant(start, kind)})" if start else "{0}"
    if start + length < bits:
        moved = f"({moved} & {form.constant(mask, kind)})"
    return form.rule(inputs, (kind,), f"{moved} | ({{1}} & {form.constant(~mask, kind)})")


@function
def inserted_field(a: Any, b: Any, start: Any, length: Any) -> Any:
    kind = a.dtype.type
    position, count = ((x & np.uint32(0xFF)).astype(kind) for x in (start, length))
    mask = ~(~kind(0) << count) << position
    return ((a << position) & mask) | (b & ~mask)


_RULES = {"prmt": _prmt, "bfe": _bfe, "bfi": _bfi}
