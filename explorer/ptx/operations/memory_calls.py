"""Turns loads, stores, atomics and `cvta` into calls. Handles widths of registers and memory, 128 bits, and
parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.instructions import (
    WIDTHS,
    Address,
    Float,
    Instruction,
    Integer,
    Operand,
    Register,
    Symbol,
    Vector,
)
from tricomm.explorer.ptx.operations.atomics import AtomicSite
from tricomm.explorer.ptx.operations.lane_memory import LOCAL_WINDOW, SHARED_WINDOW
from tricomm.explorer.ptx.operations.load_store import MemorySite
from tricomm.explorer.ptx.operations.memory_forms import MemoryForm, memory_form, unknown_form
from tricomm.explorer.ptx.operations.operation import KnownOperands, Operation
from tricomm.explorer.ptx.unit_view import UnitView


def register_size(register: Register) -> int:
    """The size of a register in bytes."""
    return WIDTHS[register.kind] // 8


def load(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    if any(m == "param" or m.startswith("param::") for m in instruction.modifiers):
        return _parameter(instruction, operands)
    form = memory_form(instruction)
    stride = operands.address(form.address)[1]
    site = MemorySite(form, operands.unit.lanes, stride)
    sizes = [register_size(r) if isinstance(r, Register) else form.itemsize for r in form.results]
    signed = form.type[0] == "s"
    if stride == 0 and not partial and form.itemsize < 16 and form.space != "local":
        return Operation(
            _load_number(site, sizes, signed), form.results, ("number",) * len(sizes), form.address, strong=form.strong
        )
    kinds = tuple("V16" if form.itemsize == 16 else f"u{size}" for size in sizes)
    return Operation(_load(site, sizes, signed), form.results, kinds, form.address, strong=form.strong)


def _load_number(site: MemorySite, sizes: list[int], signed: bool) -> Callable[..., Any]:
    bits, width = 8 * site.form.itemsize, 8 * sizes[0]
    if not signed or bits >= width:
        return lambda unit, mask, base: site.load_number(unit, base)
    half, most = 1 << (bits - 1), (1 << width) - 1

    def extended(unit: UnitView, mask: Array | None, base: int) -> Any:
        loaded = site.load_number(unit, base)
        if isinstance(loaded, int):
            return (loaded ^ half) - half & most
        return [(value ^ half) - half & most for value in loaded]

    return extended


def _load(site: MemorySite, sizes: list[int], signed: bool) -> Callable[..., Any]:
    itemsize = site.form.itemsize
    if itemsize == 16:
        return lambda unit, mask, base: _single(_paired(site.load(unit, mask, base)))
    if all(size == itemsize for size in sizes):
        if len(sizes) > 1:
            return site.load
        return lambda unit, mask, base: site.load(unit, mask, base)[0]

    def extended(unit: UnitView, mask: Array | None, base: Any) -> Any:
        loaded = site.load(unit, mask, base)
        if signed:
            loaded = [
                value.view(f"i{itemsize}").astype(f"i{s}").view(f"u{s}") for value, s in zip(loaded, sizes, strict=True)
            ]
        else:
            loaded = [value.astype(f"u{size}") for value, size in zip(loaded, sizes, strict=True)]
        return _single(loaded)

    return extended


def _single(values: list[Array]) -> Any:
    return values[0] if len(values) == 1 else values


def _paired(values: list[Array]) -> list[Array]:
    """Values of 128 bits from their 64-bit halves."""
    return [
        np.stack([low, high], axis=1).view("V16").reshape(len(low))
        for low, high in zip(values[::2], values[1::2], strict=True)
    ]


def _halves(value: Array) -> list[Array]:
    table = np.ascontiguousarray(value).view("u8").reshape(len(value), 2)
    return [np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])]


def store(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    form = memory_form(instruction)
    site = MemorySite(form, operands.unit.lanes, operands.address(form.address)[1])
    kinds = [f"u{s}" if (s := _source_size(o, form)) < 16 else "V16" for o in form.sources]
    word = f"u{form.itemsize}"
    if form.itemsize == 16:

        def call(unit: UnitView, mask: Array | None, base: Any, *values: Array) -> None:
            site.store(unit, mask, base, [half for value in values for half in _halves(value)])

    elif all(kind == word for kind in kinds):

        def call(unit: UnitView, mask: Array | None, base: Any, *values: Array) -> None:
            site.store(unit, mask, base, values)

    else:

        def call(unit: UnitView, mask: Array | None, base: Any, *values: Array) -> None:
            site.store(unit, mask, base, [value.astype(word) for value in values])

    arguments = tuple((o, k) for o, k in zip(form.sources, kinds, strict=True) if o is not None)
    return Operation(call, address=form.address, arguments=arguments, strong=False)


def _source_size(operand: Operand | None, form: MemoryForm) -> int:
    if operand is None:
        raise unknown_form(form.instruction, "a source is `_`")
    return register_size(operand) if isinstance(operand, Register) else form.itemsize


def atomic(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    form = memory_form(instruction)
    if form.space not in ("global", "shared", ""):
        raise unknown_form(instruction, "atomics are known in global and shared memory")
    site = AtomicSite(form, MemorySite(form, operands.unit.lanes, operands.address(form.address)[1]))
    kind = "V16" if form.itemsize == 16 else f"u{form.itemsize}"
    for operand in (*form.results, *form.sources):
        if isinstance(operand, Register) and register_size(operand) != form.itemsize:
            raise unknown_form(instruction, f"{operand.name} does not have the width of .{form.type}")
    arguments = tuple((o, kind) for o in form.sources if o is not None)
    if form.kind == "red":
        return Operation(site.reduce, address=form.address, arguments=arguments, strong=True)
    results = form.results or (None,)
    return Operation(site.call, results, (kind,) * len(results), form.address, arguments, strong=True)


def _parameter(instruction: Instruction, operands: KnownOperands) -> Operation:
    """`ld.param`: the same number in all lanes. It is no memory access, because parameters are read-only."""
    target, address = instruction.operands[:2]
    targets = target.elements if isinstance(target, Vector) else (target,)
    kind = instruction.modifiers[-1]
    size = WIDTHS.get(kind, 0) // 8
    if not 0 < size < 16 or not isinstance(address, Address) or any(isinstance(t, Integer | Float) for t in targets):
        raise unknown_form(instruction, "this form of ld.param is not known")
    if not isinstance(address.base, Symbol) and operands.address(address)[1] != 0:
        raise unknown_form(instruction, "the address of a parameter has to be the same in all lanes")
    signed = kind[0] == "s"
    places = range(0, size * len(targets), size)
    sizes = [register_size(t) if isinstance(t, Register) else size for t in targets]

    def call(unit: UnitView, mask: Array | None, offset: int) -> Any:
        given = unit.block.parameters
        loaded = [
            int.from_bytes(given[offset + p : offset + p + size], "little", signed=signed) & (1 << 8 * s) - 1
            for p, s in zip(places, sizes, strict=True)
        ]
        return loaded if len(loaded) > 1 else loaded[0]

    return Operation(call, targets, ("number",) * len(targets), address)


# Generic addresses have the space in their highest bits. Global addresses are unchanged.
WINDOWS = {"global": 0, "const": 0, "param": 0, "shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


def window_of(instruction: Instruction) -> int:
    """The offset that `cvta` adds to make an address generic. It is negative for the reverse."""
    modifiers = [m.split("::")[0] for m in instruction.modifiers]
    space = next((m for m in modifiers if m in WINDOWS), None)
    if space is None or modifiers[-1] not in ("u64", "b64") or space == "param":
        raise unknown_form(instruction, "this conversion of addresses is not known")
    return -WINDOWS[space] if "to" in modifiers else WINDOWS[space]


def cvta(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation | None:
    """`cvta` as a call; None if the address is a number, for which `generated.number_code` has the code."""
    target, source = instruction.operands
    window = window_of(instruction)
    if operands.shape(source, 64).stride is not None:
        return None
    step = np.uint64(window & (1 << 64) - 1)
    arguments = ((source, "u8"),)

    def call(unit: UnitView, mask: Array | None, address: Array) -> Array:
        return address + step

    return Operation(call, (target,), ("u8",), arguments=arguments)
