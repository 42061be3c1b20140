"""`multimem`: one address that stands for the same place in several GPUs' memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.generated.operand_code import Operands
from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.ptx.operations.atomics import AtomicSite
from tricomm.explorer.ptx.operations.load_store import MemorySite
from tricomm.explorer.ptx.operations.memory_forms import MemoryForm, flat, memory_form, unknown_form
from tricomm.explorer.ptx.operations.operation import Operation
from tricomm.explorer.ptx.unit_view import UnitView

_OPERATIONS = ("add", "min", "max", "and", "or", "xor")
_REDUCE: dict[str, Any] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_TYPES = {
    "u32": "u4",
    "s32": "i4",
    "b32": "u4",
    "u64": "u8",
    "s64": "i8",
    "b64": "u8",
    "f32": "f4",
    "f64": "f8",
    "f16": "f2",
    "f16x2": "f2",
}


def multimem(instruction: Instruction, operands: Operands, partial: bool) -> Operation:
    kind = instruction.modifiers[0]
    if kind not in ("ld_reduce", "st", "red"):
        raise unknown_form(instruction, "this multimem operation is not known")
    op = next((m for m in instruction.modifiers[1:] if m in _OPERATIONS), "")
    if kind != "st" and not op:
        raise unknown_form(instruction, "the operation is not known")
    rest = tuple(m for m in instruction.modifiers[1:] if m != op and not m.startswith("acc::"))
    plain = replace(instruction, opcode="ld" if kind == "ld_reduce" else "st", modifiers=rest)
    form = replace(memory_form(plain), instruction=instruction)
    lanes = operands.unit.lanes
    if kind == "ld_reduce":
        return _load(form, op, instruction, lanes)
    if kind == "st":
        return _store(form, lanes)
    return _reduce(form, op, lanes)


def _sources(form: MemoryForm) -> tuple[tuple[Any, str], ...]:
    return ((form.address, "address"), *((o, f"u{form.itemsize}") for o in form.sources))


def _load(form: MemoryForm, op: str, instruction: Instruction, lanes: int) -> Operation:
    if form.type not in _TYPES and form.type not in ("bf16", "bf16x2"):
        raise unknown_form(instruction, f"the type .{form.type} is not known here")
    site = MemorySite(form, lanes, None)
    wide = "acc::f32" in instruction.modifiers or form.type.startswith("bf16")

    def call(unit: UnitView, mask: Array | None, addresses: Array) -> Any:
        parts = [
            [_decoded(value, form.type, wide) for value in site.load(unit, mask, at)]
            for at in unit.memory.members(addresses, mask)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = [_REDUCE[op](one, two) for one, two in zip(total, part, strict=True)]
        words = [_encoded(value, form.type, form.itemsize) for value in total]
        return words if len(words) > 1 else words[0]

    results = flat((instruction.operands[0],))
    kinds = (f"u{form.itemsize}",) * len(results)
    return Operation(call, results, kinds, arguments=((form.address, "address"),), strong=form.strong)


def _decoded(words: Array, kind: str, wide: bool) -> Array:
    if kind.startswith("bf16"):
        return (words.view("u2").astype("u4") << np.uint32(16)).view("f4")
    values = words.view(_TYPES[kind])
    return values.astype("f4") if wide and values.dtype == np.float16 else values


def _encoded(values: Array, kind: str, itemsize: int) -> Array:
    if kind.startswith("bf16"):
        bits = values.view("u4")
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        values = np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype("u2")
    elif kind.startswith("f16"):
        values = values.astype("f2")
    return np.ascontiguousarray(values).view(f"u{itemsize}")


def _store(form: MemoryForm, lanes: int) -> Operation:
    site = MemorySite(form, lanes, None)

    def call(unit: UnitView, mask: Array | None, addresses: Array, *values: Array) -> None:
        for at in unit.memory.members(addresses, mask):
            site.store(unit, mask, at, values)

    return Operation(call, arguments=_sources(form))


def _reduce(form: MemoryForm, op: str, lanes: int) -> Operation:
    form = replace(form, kind="red", op=op, sem=form.sem or "relaxed", scope=form.scope or "sys")
    site = AtomicSite(form, MemorySite(form, lanes, None))

    def call(unit: UnitView, mask: Array | None, addresses: Array, *values: Array) -> None:
        for at in unit.memory.members(addresses, mask):
            site.call(unit, mask, at, *values)

    return Operation(call, arguments=_sources(form), strong=True)
