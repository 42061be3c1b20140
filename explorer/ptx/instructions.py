"""One kernel of a PTX module: its instructions, registers, parameters and shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field

# Bits of a value of each type.
WIDTHS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "b128": 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Register:
    """A register. `kind` is its declared type without the dot: pred, b8, b16, b32, b64, b128, f32, f64, s32, u64, ...

    `name` is unique in the kernel: a register of an inner scope `{ .reg .pred p; ... }` gets a number, such as `p@3`.
    """

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register: `%tid.x`, `%ctaid.y`, `%laneid`, `%globaltimer`, ..."""

    name: str


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer literal. `value` may be negative."""

    value: int


@dataclass(frozen=True, slots=True)
class Float:
    """A literal `0f3F800000` or `0d...`, as its bits. `width` is 32 or 64."""

    bits: int
    width: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable: shared, constant or global."""

    name: str


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """The address `[base + offset]`, `offset` in bytes. The base is a register, a variable, a parameter, or None (a
    number)."""

    base: Register | Symbol | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """The vector `{a, b, ...}`. An element `_` is None."""

    elements: tuple[Operand | None, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair of destinations: `p|q` of `setp`, `d|p` of `shfl`. A destination `_` is None."""

    first: Register | None
    second: Register | None


@dataclass(frozen=True, slots=True)
class Negated:
    """The source operand `!p`."""

    register: Register


Operand = Register | Special | Integer | Float | Symbol | Label | Address | Vector | Pair | Negated


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of Python code. `function` is None in the kernel itself, whose name the caller knows."""

    file: str
    line: int
    function: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """An instruction. `@!p add.s32 d, a, b;` has the opcode `add` and the modifiers `("s32",)`; its first operand is
    the destination.

    guard       (predicate register, True for `@!`), or None.
    line        in the PTX text, from 1.
    source      its Python lines: the innermost first, then the lines of the calls that it was inlined at.
    inline      it is part of inline assembly.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    line: int
    text: str
    source: tuple[SourceLine, ...] = ()
    inline: bool = False

    @property
    def name(self) -> str:
        """Opcode and modifiers, as in the text."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an entry: `offset` and `size` are bytes in the parameter space. `pointer`: it is declared
    `.ptr`."""

    name: str
    kind: str
    offset: int
    size: int
    pointer: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the module or kernel. `space` is shared, const, global or local. A `size` of 0 is dynamic shared
    memory."""

    name: str
    space: str
    size: int
    align: int
    data: bytes = b""


@dataclass(frozen=True)
class PtxKernel:
    """One `.entry`. `labels` has the index of the instruction after each label (`len(instructions)` for the end).

    target      "sm_90a"
    threads     threads of a block by `.reqntid`, or None
    most        most threads of a block by `.maxntid`, or None
    registers   every register by its name
    """

    name: str
    target: str
    version: tuple[int, int]
    parameters: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, Register]
    variables: dict[str, Variable] = field(default_factory=dict)
    threads: tuple[int, int, int] | None = None
    max_registers: int | None = None
    most: int | None = None


def registers_of(operand: Operand | None) -> tuple[Register, ...]:
    """The registers that an operand names, in order."""
    match operand:
        case Register():
            return (operand,)
        case Negated(register):
            return (register,)
        case Address(Register() as base):
            return (base,)
        case Pair(first, second):
            return tuple(register for register in (first, second) if register is not None)
        case Vector(elements):
            return tuple(register for element in elements for register in registers_of(element))
        case _:
            return ()
