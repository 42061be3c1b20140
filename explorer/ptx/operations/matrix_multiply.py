"""`mma.sync` of f16, bf16, tf32, e4m3 and e5m2 with f32 sums. The lanes of a warp hold the parts of small matrices.

With n the lane, E = 32 / bits elements a register, g = n / 4 and t = n % 4: register r of A has columns
E (t + 4 (r / 2)) and following of row g + 8 (r % 2), register r of B has rows E (t + 4 r) and following of column g.
Registers 2 i and 2 i + 1 of C and D are columns 2 t and 2 t + 1 of row g + 8 i.

The order in which hardware adds the products is not documented. Here a sum is computed in double and rounded once.
"""

from __future__ import annotations

import re

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.arithmetic.rounding import decoded
from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.ptx.operations.memory_forms import flat, unknown_form
from tricomm.explorer.ptx.operations.operation import KnownOperands, Operation
from tricomm.explorer.ptx.unit_view import WARP, UnitView

_ELEMENTS = {"tf32": 1, "f16": 2, "bf16": 2, "e4m3": 4, "e5m2": 4}  # per register
_KIND = "|".join(_ELEMENTS)
_FORM = re.compile(rf"sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.({_KIND})\.({_KIND})\.f32")
_SMALL = {kind: decoded(kind) for kind in ("e4m3", "e5m2")}
_NAN = np.uint32(0x7FFFFFFF)
_LANE = np.arange(WARP)
_ROW, _COLUMN = _LANE // 4, _LANE % 4


def multiply(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    form = _FORM.fullmatch(".".join(instruction.modifiers))
    if form is None or _ELEMENTS[form[2]] != _ELEMENTS[form[3]]:
        raise unknown_form(instruction, f"of mma, m16n8 of {_KIND} with f32 sums is known")
    if operands.unit.lanes % WARP:
        raise unknown_form(instruction, "whole warps are expected")
    depth, kinds, each = int(form[1]), (form[2], form[3]), _ELEMENTS[form[2]]
    parts = depth // (4 * each)  # registers of B; A has two times this number
    results, *sources = (flat((operand,)) for operand in instruction.operands)
    if [len(results), *map(len, sources)] != [4, 2 * parts, parts, 4] or depth != parts * 4 * each:
        raise unknown_form(instruction, "its operands do not fit its shape")

    def call(unit: UnitView, mask: Array | None, *registers: Array) -> list[Array]:
        words = [register.reshape(-1, WARP) for register in registers]
        left, right = np.zeros((len(words[0]), 16, depth)), np.zeros((len(words[0]), depth, 8))
        for r, word in enumerate(words[: 3 * parts]):
            for e, values in enumerate(_elements(word, kinds[r >= 2 * parts])):
                if r < 2 * parts:
                    left[:, _ROW + 8 * (r % 2), each * (_COLUMN + 4 * (r // 2)) + e] = values
                else:
                    right[:, each * (_COLUMN + 4 * (r - 2 * parts)) + e, _ROW] = values
        with np.errstate(all="ignore"):
            product, sums = left @ right, []
            for i, word in enumerate(words[3 * parts :]):
                own = (product[:, _ROW + 8 * (i // 2), 2 * _COLUMN + i % 2] + word.view("f4")).astype("f4").reshape(-1)
                sums.append(np.where(np.isnan(own), _NAN, own.view("u4")))
        return sums

    given = tuple((operand, "u4") for source in sources for operand in source if operand is not None)
    return Operation(call, results, ("u4",) * 4, arguments=given, waits=True)


def _elements(word: Array, kind: str) -> list[Array]:
    """The numbers in registers. The number in the lowest bits is the first."""
    if kind == "tf32":
        return [(word & np.uint32(0xFFFFE000)).view("f4")]
    if kind in _SMALL:
        return [_SMALL[kind][word >> np.uint32(8 * e) & np.uint32(0xFF)] for e in range(4)]
    halves = [word & np.uint32(0xFFFF), word >> np.uint32(16)]
    if kind == "bf16":
        return [(half << np.uint32(16)).view("f4") for half in halves]
    return [half.astype("u2").view("f2") for half in halves]
