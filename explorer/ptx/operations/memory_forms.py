"""Reads a memory instruction's kind, space, width, semantics and scope from its modifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.access import Array, ThreadAccess
from tricomm.explorer.ptx.instructions import WIDTHS, Address, Instruction, Operand, Vector

ORDERS = ("volatile", "relaxed", "acquire", "release", "acq_rel", "sc")
SCOPES = ("cta", "cluster", "gpu", "sys")
_SPACES = {
    "global": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "local": "local",
    "const": "const",
    "param": "param",
    "param::entry": "param",
}
_CACHES = ("ca", "cg", "cs", "cv", "wb", "wt", "lu", "nc", "weak", "unified", "noftz")
OPERATIONS = ("add", "exch", "cas", "min", "max", "and", "or", "xor", "inc", "dec")
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_SIZES = {kind: bits // 8 for kind, bits in WIDTHS.items() if bits >= 8}


@dataclass(frozen=True, slots=True)
class MemoryForm:
    """A memory instruction's operation and operands.

    `type` is as in the text ("u8", "bf16x2"), `itemsize` its bytes. `space` is "" for a generic address. `sem` and
    `scope` are None for a weak access. `op` is "" for a load or store.
    """

    kind: str
    op: str
    space: str
    type: str
    itemsize: int
    elements: int
    sem: str | None
    scope: str | None
    address: Address
    results: tuple[Operand | None, ...]
    sources: tuple[Operand | None, ...]
    instruction: Instruction

    @property
    def strong(self) -> bool:
        return self.sem is not None

    def access(self, space: str, threads: Array, addresses: Array, *how: Any) -> ThreadAccess:
        """The access of `threads` to `addresses` of `space`. `how` has its `perform`, `supply` and `stored`."""
        return ThreadAccess(
            self.kind,
            self.op,
            space,
            threads,
            addresses,
            self.itemsize,
            self.elements,
            self.sem,
            self.scope,
            self.instruction,
            *how,
        )


def place_of(instruction: Instruction) -> str:
    """The text, PTX line and Python line of an instruction. For code of Triton's library, the Python line that calls
    it."""
    lines = [line for line in instruction.source if "/triton/language/" not in line.file] or instruction.source
    where = f"{lines[0].file}:{lines[0].line}" if lines else "no source line"
    return f"`{instruction.text.strip()}` (PTX line {instruction.line}, {where})"


def unknown_form(instruction: Instruction, why: str) -> InvalidArgument:
    """The error for an instruction that is not supported."""
    return InvalidArgument(f"{place_of(instruction)}: {why}")


def address_of(instruction: Instruction, operand: Operand | None) -> Address:
    """`operand`, which must be an address. Raises `InvalidArgument` if it is something else."""
    if not isinstance(operand, Address):
        raise unknown_form(instruction, "an address in brackets is expected")
    return operand


def memory_form(instruction: Instruction) -> MemoryForm:
    """The form of `ld`, `ldu`, `st`, `atom` or `red`. Raises `InvalidArgument` for one that is not known."""
    space, kind, op, sem, scope, elements = "", instruction.opcode, "", None, None, 1
    types = []
    for modifier in instruction.modifiers:
        if modifier in _SPACES:
            space = _SPACES[modifier]
        elif modifier in ORDERS or modifier == "mmio":
            sem = modifier if modifier != "mmio" else sem
        elif modifier in SCOPES:
            scope = modifier
        elif modifier in _VECTORS:
            elements = _VECTORS[modifier]
        elif modifier in _SIZES:
            types.append(modifier)
        elif modifier in OPERATIONS and kind in ("atom", "red"):
            op = modifier
        elif modifier not in _CACHES and not modifier.startswith(("L1::", "L2::")):
            raise unknown_form(instruction, f"the modifier .{modifier} is not known here")
    if len(types) != 1:
        raise unknown_form(instruction, "one type is expected")
    if kind in ("atom", "red"):
        sem, scope = sem or "relaxed", scope or "gpu"
        if not op:
            raise unknown_form(instruction, "the operation is not known")
    elif sem is not None:
        scope = scope or "sys"  # a volatile access is a relaxed access of system scope
    address, results, sources = _operands(instruction)
    kind = {"ld": "load", "ldu": "load", "st": "store", "red": "red", "atom": "cas" if op == "cas" else "rmw"}[kind]
    count = max(len(results), 1 if kind in ("rmw", "cas") else len(sources))
    if kind in ("load", "store") and elements != count:
        raise unknown_form(instruction, f"{elements} elements are expected, not {count}")
    return MemoryForm(
        kind, op, space, types[0], _SIZES[types[0]], elements, sem, scope, address, results, sources, instruction
    )


def _operands(instruction: Instruction) -> tuple[Address, tuple[Operand | None, ...], tuple[Operand | None, ...]]:
    """The address, the destinations (registers, None for `_`), and the sources."""
    operands = instruction.operands
    at = next((n for n, operand in enumerate(operands) if isinstance(operand, Address)), len(operands))
    address = address_of(instruction, operands[at] if at < len(operands) else None)
    sources = operands[at + 1 :]
    if instruction.opcode in ("ld", "ldu"):
        sources = ()  # a cache policy
    elif instruction.opcode in ("st", "red"):
        sources = sources[:1]
    elif "cas" in instruction.modifiers:
        sources = sources[:2]
    else:
        sources = sources[:1]
    return address, flat(operands[:at]), flat(sources)


def flat(operands: tuple[Operand | None, ...]) -> tuple[Operand | None, ...]:
    """The operands, with vectors replaced by their elements."""
    result: list[Operand | None] = []
    for operand in operands:
        result += operand.elements if isinstance(operand, Vector) else (operand,)
    return tuple(result)
