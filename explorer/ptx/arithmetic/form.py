"""How one computing instruction becomes numpy code: `Form`, the instruction, and `Rule`, the code for it."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from tricomm.explorer.ptx.instructions import (
    Float,
    Instruction,
    Integer,
    Negated,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)

# The flag that `.cc` writes and that `addc`, `subc` and `madc` read.
CARRY = Register("%cc.cf", "pred")

_TYPE = re.compile(
    r"pred|[bus](8|16|32|64|128)|[us][24]|b?f16(x2)?|f32(x2)?|f64|[us]16x2|[us]8x4|e4m3(x[24])?|e5m2(x[24])?|"
    r"e2m[13]x[24]|e3m2x[24]|ue8m0x2"
)
_NUMPY = {
    "pred": "?",
    "f16": "f2",
    "bf16": "u2",
    "f16x2": "u4",
    "bf16x2": "u4",
    "s16x2": "u4",
    "u16x2": "u4",
    "s8x4": "u4",
    "u8x4": "u4",
    "f32": "f4",
    "f64": "f8",
    "f32x2": "u8",
    "b128": "V16",
}
_LETTER = {"b": "u", "u": "u", "s": "i"}


def numpy_type(kind: str) -> str:
    """The numpy type of a register of the PTX type `kind`: "s32" is "i4", "bf16" is "u2"."""
    return _NUMPY.get(kind) or f"{_LETTER[kind[0]]}{int(kind[1:]) // 8}"


def width(kind: str) -> int:
    """Bits of a register of the PTX type `kind`; a predicate has 1."""
    return 1 if kind == "pred" else np.dtype(numpy_type(kind)).itemsize * 8


def destinations(instruction: Instruction) -> tuple[Operand | None, ...]:
    """The operands that a computing instruction writes. Vectors and pairs are split, `_` is None, the carry flag is
    last."""
    first = instruction.operands[0]
    carry = (CARRY,) if "cc" in instruction.modifiers else ()
    if isinstance(first, Vector):
        return (*first.elements, *carry)
    if isinstance(first, Pair):
        return (first.first, first.second)
    return (first, *carry)


def sources(instruction: Instruction) -> tuple[Operand | None, ...]:
    """The operands that a computing instruction reads. Vectors are split, the carry flag is last."""
    operands: list[Operand | None] = []
    for operand in instruction.operands[1:]:
        operands.extend(operand.elements if isinstance(operand, Vector) else (operand,))
    if instruction.opcode in ("addc", "subc", "madc"):
        operands.append(CARRY)
    return tuple(operands)


def literal(operand: Integer | Float, kind: str) -> Any:
    """A literal as a numpy scalar of the numpy type `kind`. An integer literal wraps around."""
    dtype = np.dtype(kind)
    if isinstance(operand, Float):
        if operand.width == dtype.itemsize * 8:
            return operand_bits(operand.bits, dtype)
        given = np.frombuffer(operand.bits.to_bytes(operand.width // 8, "little"), f"f{operand.width // 8}")
        return dtype.type(given[0])
    if kind == "?":
        return np.bool_(operand.value != 0)
    return operand_bits(operand.value, dtype)


def operand_bits(value: int, dtype: np.dtype[Any]) -> Any:
    """A numpy scalar of `dtype` with the low bits of `value`."""
    bits = (value & (1 << dtype.itemsize * 8) - 1).to_bytes(dtype.itemsize, "little")
    return np.frombuffer(bits, dtype)[0]


@dataclass(frozen=True, slots=True)
class Rule:
    """The Python expression `template` for an instruction, over arrays (or numpy scalars) of one element per thread.

    inputs      numpy types of the source operands, in the order of `form.sources`: "u4", "i8", "f4", "?" (a
                predicate), "f2" for .f16, "u2" for .bf16, "u4" for packed halves, "u8" for .f32x2, "V16" for .b128;
                the caller views registers as these types, and turns literals into scalars (`form.literal`). A literal
                may have another width than a register in its place would have
    outputs     numpy types of the destinations, in the order of `form.destinations`. With more than one the expression
                returns a tuple, in which None may stand for a destination `_`
    template    names the inputs `{0}`, `{1}`, ..., and then the constants. It may call any function of
                `arithmetic.FUNCTIONS`, and need not contain every input
    constants   numpy scalars, numbered after the inputs
    either      a type such as "u4", or None. All inputs and outputs of this type may be read as the signed type instead
                (all or none), because the operation is the same

    The expression must also be right for 0-dimensional values, must not change its inputs, and must return exactly the
    declared types for arrays of the declared types. Input and output arrays are contiguous. The expression may return
    one of its inputs itself.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: str
    constants: tuple[np.generic, ...] = ()
    either: str | None = None


class Form:
    """An instruction that needs a rule. `constant` collects the constants of the template."""

    def __init__(self, instruction: Instruction) -> None:
        self.opcode = instruction.opcode
        self.types = tuple(m for m in instruction.modifiers if _TYPE.fullmatch(m))
        self.flags = tuple(m for m in instruction.modifiers if not _TYPE.fullmatch(m))
        self.destinations = destinations(instruction)
        self.sources = sources(instruction)
        self.packs = any(isinstance(operand, Vector) for operand in instruction.operands[1:])
        self.unpacks = isinstance(instruction.operands[0], Vector)
        self.constants: list[np.generic] = []

    @property
    def type(self) -> str:
        """The instruction's type, or the last of several."""
        return self.types[-1] if self.types else ""

    def of_type(self, kind: str) -> Form:
        """The same form with another type."""
        other = copy(self)
        other.types, other.constants = (kind,), []
        return other

    def has(self, destinations: int, sources: int, *flags: str) -> bool:
        """True if it has these numbers of operands, and no flags other than these."""
        counted = len(self.destinations) == destinations and len(self.sources) == sources
        return counted and set(self.flags) <= set(flags)

    def value(self, index: int) -> int | None:
        """The value of a source if it is an integer literal, else None."""
        source = self.sources[index]
        return source.value if isinstance(source, Integer) else None

    def constant(self, value: int | float, kind: str) -> str:
        """Add a constant; returns its place in the template."""
        dtype = np.dtype(kind)
        scalar = operand_bits(value, dtype) if isinstance(value, int) and dtype.kind in "iu" else dtype.type(value)
        self.constants.append(scalar)
        return f"{{{len(self.sources) + len(self.constants) - 1}}}"

    def rule(self, inputs: tuple[str, ...], outputs: tuple[str, ...], template: str, either: str | None = None) -> Rule:
        return Rule(inputs, outputs, template, tuple(self.constants), either)

    def fits(self, rule: Rule) -> bool:
        """True if the operands have the kinds and widths of the rule's types."""
        if len(rule.outputs) != len(self.destinations) or len(rule.inputs) != len(self.sources):
            return False
        for operand, kind in zip(self.destinations, rule.outputs, strict=True):
            if operand is not None and not (isinstance(operand, Register) and _same_width(operand, kind)):
                return False
        return all(_readable(operand, kind) for operand, kind in zip(self.sources, rule.inputs, strict=True))


def _readable(operand: Operand | None, kind: str) -> bool:
    if isinstance(operand, Register):
        return _same_width(operand, kind)
    if isinstance(operand, Negated):
        return kind == "?" and operand.register.kind == "pred"
    return isinstance(operand, Integer | Float | Special | Symbol)


def _same_width(register: Register, kind: str) -> bool:
    if kind == "?" or register.kind == "pred":
        return kind == "?" and register.kind == "pred"
    return width(register.kind) == np.dtype(kind).itemsize * 8
