"""Python expressions for operands: a number, an array of a numpy type, or a predicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tricomm.explorer.ptx.generated.lane_shapes import LaneShape, anything, literal, uniform
from tricomm.explorer.ptx.generated.lane_values import lane_values
from tricomm.explorer.ptx.generated.special_registers import special_shape, special_value
from tricomm.explorer.ptx.instructions import (
    WIDTHS,
    Address,
    Float,
    Integer,
    Negated,
    Operand,
    PtxKernel,
    Register,
    Special,
    Symbol,
)
from tricomm.explorer.ptx.unit_view import UnitShape

_FLOATS = {"f2": "u2", "f4": "u4", "f8": "u8"}


class Operands:
    """The operands of one kernel in units of one shape. `shapes` and `homes` have the shape of each register and the
    numpy type of each array register.

    `names` are the globals of the expressions; `variable` gives the name that holds a register's value.
    """

    def __init__(
        self, kernel: PtxKernel, unit: UnitShape, shapes: dict[str, LaneShape], addresses: dict[str, int]
    ) -> None:
        self.kernel, self.unit, self.shapes, self.addresses = kernel, unit, shapes, addresses
        self.homes: dict[str, str] = {}
        self.values = lane_values(unit.lanes)
        self.names: dict[str, Any] = dict(self.values.names)
        self._variables: dict[str, str] = {}
        self._constants: dict[tuple[Any, ...], str] = {}

    def variable(self, register: Register) -> str:
        name = self._variables.get(register.name)
        if name is None:
            name = self._variables[register.name] = f"r{len(self._variables)}"
        return name

    def home(self, register: Register) -> str:
        return self.homes.get(register.name) or numpy_word(register.kind)

    def shape(self, operand: Operand | None, width: int) -> LaneShape:
        """The shape of an operand. `width` is the width of a literal."""
        if isinstance(operand, Register):
            return self.shapes.get(operand.name) or anything(WIDTHS.get(operand.kind, 64))
        if isinstance(operand, Integer):
            return literal(int(operand.value != 0) if width == 1 else operand.value, width)
        if isinstance(operand, Float):
            return literal(operand.bits, operand.width)
        if isinstance(operand, Special):
            return special_shape(operand.name, self.unit)
        if isinstance(operand, Symbol):
            return literal(self.addresses[operand.name], width)
        if isinstance(operand, Negated):
            return anything(1) if self.shape(operand.register, 1).stride is None else uniform(1)
        return anything(width)

    def number(self, operand: Operand | None, width: int) -> str:
        """The code of an operand that has a stride, or is a predicate or flag."""
        if isinstance(operand, Register):
            return self.variable(operand)
        if isinstance(operand, Negated):
            if self.shape(operand.register, 1).stride is None:
                return f"_p_not({self.variable(operand.register)})"
            return f"(not {self.variable(operand.register)})"
        if isinstance(operand, Special):
            return f"{self.special(operand)}(u)"
        shape = self.shape(operand, width)
        return str(bool(shape.low)) if width == 1 else str(shape.low)

    def special(self, operand: Special) -> str:
        return self.named(special_value(operand.name), "special", operand.name)

    def named(self, value: Any, *key: Any) -> str:
        """Give an object a name in the generated code; returns the name."""
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"K{len(self._constants)}"
            self.names[name] = value
        return name

    def constant(self, value: int, kind: str) -> str:
        """A name for an array whose lanes all hold the bits `value`."""
        key = ("array", value, kind)
        name = self._constants.get(key)
        return name if name is not None else self.named(self.values.constant(value, kind), *key)

    def steps(self, stride: int, kind: str) -> str:
        key = ("steps", stride, kind)
        name = self._constants.get(key)
        return name if name is not None else self.named(self.values.steps(stride, kind), *key)

    def dtype(self, kind: str) -> str:
        return self.named(np.dtype(kind), "dtype", kind)

    def array(self, operand: Operand | None, kind: str) -> str:
        """The code of an operand as an array of the numpy type `kind`."""
        if kind == "?":
            return f"_p_array({self.number(operand, 1)})"
        word = f"u{kind[1:]}" if kind != "V16" else kind
        if isinstance(operand, Register):
            shape = self.shape(operand, 0)
            if shape.stride is None and not shape.flag:
                home = self.home(operand)
                return self.variable(operand) if home == kind else f"{self.variable(operand)}.view({self.dtype(kind)})"
        elif isinstance(operand, Special):
            shape = self.shape(operand, 32)
            if shape.stride is None:
                return self.cast(f"{self.special(operand)}(u)", word, kind)
        elif isinstance(operand, Float):
            return self.constant(_float_bits(operand, kind), kind)
        else:
            return self.constant(self.shape(operand, 8 * np.dtype(kind).itemsize).low, kind)
        return self.cast(self.spread(self.number(operand, 0), shape, word), word, kind)

    def spread(self, code: str, shape: LaneShape, word: str) -> str:
        """The code of a number or flag as an array of all lanes' values."""
        if shape.flag:
            return f"_flag_{word}({code})"
        if shape.constant:
            return self.constant(shape.low, word)
        if shape.uniform:
            return f"_fill_{word}({code})"
        assert shape.stride is not None
        return f"_step_{word}({code},{self.steps(shape.stride, word)})"

    def cast(self, code: str, word: str, kind: str) -> str:
        return code if word == kind else f"{code}.view({self.dtype(kind)})"

    def address(self, address: Address) -> tuple[str, int | None]:
        """The code of an address including its offset, and the stride of the address."""
        base, offset = address.base, address.offset
        if base is None:
            return str(offset), 0
        shape = self.shape(base, 64)
        if shape.stride is not None:
            if not isinstance(base, Register):
                return str(shape.low + offset), 0
            code = self.variable(base)
            return (f"({code}+{offset}&{(1 << shape.width) - 1})" if offset else code), shape.stride
        assert isinstance(base, Register)
        kind = f"u{shape.width // 8}"
        code = self.array(base, kind)
        return (f"({code}+{self.constant(offset, kind)})" if offset else code), None

    def address_array(self, address: Address) -> str:
        """The code of each lane's address, in 64-bit words or as wide as its register."""
        code, stride = self.address(address)
        return code if stride is None else f"_step_u8({code},{self.steps(stride, 'u8')})"


def numpy_word(kind: str) -> str:
    """The unsigned numpy type of a register's declared type."""
    return "V16" if kind == "b128" else "?" if kind == "pred" else f"u{WIDTHS[kind] // 8}"


def _float_bits(operand: Float, kind: str) -> int:
    size = 8 * np.dtype(kind).itemsize
    if size == operand.width:
        return operand.bits
    value = np.array([operand.bits], f"u{operand.width // 8}").view(f"f{operand.width // 8}")
    return int(value.astype(f"f{size // 8}").view(f"u{size // 8}")[0])


def scalar_functions() -> dict[str, Callable[..., Any]]:
    """Functions for each type: `_scalar_f4(bits)` returns a numpy scalar, `_bits_f4(scalar)` its bits as a Python
    int."""
    functions: dict[str, Callable[..., Any]] = {"_scalar_b": np.bool_, "_bits_b": bool}
    for letter in "uif":
        for size in (1, 2, 4, 8):
            if letter == "f" and size == 1:
                continue
            functions[f"_scalar_{letter}{size}"] = _to_scalar(f"u{size}", f"{letter}{size}")
            functions[f"_bits_{letter}{size}"] = _to_bits(f"u{size}", f"{letter}{size}")
    return functions


def _to_scalar(word: str, kind: str) -> Callable[[int], Any]:
    make, dtype = np.dtype(word).type, np.dtype(kind)
    return make if word == kind else lambda bits: make(bits).view(dtype)


def _to_bits(word: str, kind: str) -> Callable[[Any], int]:
    make, dtype = np.dtype(word), np.dtype(kind).type
    return int if word == kind else lambda value: int(dtype(value).view(make))
