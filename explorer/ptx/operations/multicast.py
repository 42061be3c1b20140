"""`multimem`: accesses by an address that stands for the same place in the memory of several GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.ptx.operations.atomics import AtomicSite, decoded, encoded
from tricomm.explorer.ptx.operations.load_store import MemorySite
from tricomm.explorer.ptx.operations.memory_forms import MemoryForm, flat, memory_form, unknown_form
from tricomm.explorer.ptx.operations.operation import KnownOperands, Operation
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


def multimem(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
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
    site = MemorySite(form, lanes, None)
    wide = "acc::f32" in instruction.modifiers and form.type.startswith("f16")

    def call(unit: UnitView, mask: Array | None, addresses: Array) -> Any:
        parts = [
            [decoded(value, form.type).astype("f4") if wide else decoded(value, form.type) for value in words]
            for words in (site.load(unit, mask, at) for at in unit.memory.members(addresses, mask))
        ]
        total = parts[0]
        for part in parts[1:]:
            total = [_REDUCE[op](one, two) for one, two in zip(total, part, strict=True)]
        results = [encoded(value, form.type, form.itemsize) for value in total]
        return results if len(results) > 1 else results[0]

    targets = flat((instruction.operands[0],))
    kinds = (f"u{form.itemsize}",) * len(targets)
    return Operation(call, targets, kinds, arguments=((form.address, "address"),), strong=form.strong)


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
