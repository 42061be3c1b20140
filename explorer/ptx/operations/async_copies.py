"""`cp.async`: copies from global to shared memory. They are performed as late as possible, when a lane waits for
them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.instructions import Address, Instruction, Integer, Operand, Register
from tricomm.explorer.ptx.operations.load_store import MemorySite
from tricomm.explorer.ptx.operations.memory_forms import MemoryForm, address_of, unknown_form
from tricomm.explorer.ptx.operations.operation import KnownOperands, Operation
from tricomm.explorer.ptx.unit_view import UnitView

_NOT_COMMITTED, _DONE = -1, -2


@dataclass(eq=False)
class Copy:
    """One `cp.async` of a unit. `groups` has each lane's group, `sizes` the bytes to read; the rest is filled with
    0."""

    sites: CopySites
    targets: Array
    sources: Array
    sizes: Array | None
    groups: Array

    def perform(self, unit: UnitView, lanes: Array) -> None:
        self.groups[lanes] = _DONE
        self.sites.copy(unit, lanes, self)


class CopySites:
    """The load and the store of copies of `size` bytes."""

    def __init__(self, instruction: Instruction, size: int, lanes: int) -> None:
        self.size, self.lanes = size, lanes
        self.load = MemorySite(_form("load", "global", 4, size // 4, instruction), lanes, None)
        self.octet = MemorySite(_form("load", "global", 1, 1, instruction), lanes, None)
        self.store = MemorySite(_form("store", "shared", 4, size // 4, instruction), lanes, None)

    def copy(self, unit: UnitView, lanes: Array, copy: Copy) -> None:
        whole = lanes if copy.sizes is None else lanes & (copy.sizes >= self.size)
        values = [np.zeros(self.lanes, "u4") for _ in range(self.size // 4)]
        if whole.any():
            values = self.load.load(unit, whole, copy.sources)
        if copy.sizes is not None:
            for n in range(self.size):
                partly = lanes & ~whole & (copy.sizes > n)
                if partly.any():
                    octet = self.octet.load(unit, partly, copy.sources + np.uint64(n))[0].astype("u4")
                    values[n // 4] = values[n // 4] | (octet << np.uint32(8 * (n % 4)))
        self.store.store(unit, lanes, copy.targets, values)


def _form(kind: str, space: str, itemsize: int, elements: int, instruction: Instruction) -> MemoryForm:
    nowhere = Address(None, 0)
    return MemoryForm(kind, "", space, f"b{8 * itemsize}", itemsize, elements, None, None, nowhere, (), (), instruction)


class Copies:
    """The pending copies of a unit. `committed` has the number of committed groups of each lane."""

    def __init__(self, lanes: int) -> None:
        self.pending: list[Copy] = []
        self.committed = np.zeros(lanes, "i8")

    def commit(self, mask: Array) -> None:
        for copy in self.pending:
            copy.groups[mask & (copy.groups == _NOT_COMMITTED)] = -3
            copy.groups = np.where(copy.groups == -3, self.committed, copy.groups)
        self.committed[mask] += 1

    def wait(self, unit: UnitView, mask: Array, newest: int | None) -> None:
        """Perform the copies of the lanes `mask` that belong to a group, but not to the `newest` latest groups. If
        `newest` is None, perform all copies."""
        for copy in self.pending:
            if newest is None:
                lanes = mask & (copy.groups != _DONE)
            else:
                lanes = mask & (copy.groups >= 0) & (copy.groups < self.committed - newest)
            if lanes.any():
                copy.perform(unit, lanes)
        self.pending = [copy for copy in self.pending if (copy.groups != _DONE).any()]


def cp(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    modifiers = instruction.modifiers
    if modifiers[:1] != ("async",) or "bulk" in modifiers:
        raise unknown_form(instruction, "of the asynchronous copies only cp.async is known")
    lanes = operands.unit.lanes
    all_lanes = np.ones(lanes, bool)
    if modifiers[1:] == ("commit_group",):
        return Operation(lambda unit, mask: unit.copies.commit(all_lanes if mask is None else mask))
    if modifiers[1:] in (("wait_group",), ("wait_all",)):
        newest = None
        if modifiers[1] == "wait_group":
            (count,) = instruction.operands
            if not isinstance(count, Integer):
                raise unknown_form(instruction, "the number of groups has to be a constant")
            newest = count.value
        return Operation(lambda unit, mask: unit.copies.wait(unit, all_lanes if mask is None else mask, newest))
    if modifiers[1] not in ("ca", "cg") or "global" not in modifiers:
        raise unknown_form(instruction, "this form of cp.async is not known")
    return _copy(instruction, lanes)


def _copy(instruction: Instruction, lanes: int) -> Operation:
    target, source, size, *rest = instruction.operands
    if not isinstance(size, Integer) or size.value not in (4, 8, 16):
        raise unknown_form(instruction, "this form of cp.async is not known")
    target, source = address_of(instruction, target), address_of(instruction, source)
    sites = CopySites(instruction, size.value, lanes)
    ignored = bool(rest) and isinstance(rest[0], Register) and rest[0].kind == "pred"
    arguments: list[tuple[Operand, str]] = [(target, "address"), (source, "address")]
    if rest and not (isinstance(rest[0], Register) and rest[0].kind in ("b64", "u64", "s64")):  # a cache policy
        arguments.append((rest[0], "?" if ignored else "u4"))

    def call(unit: UnitView, mask: Array | None, targets: Array, sources: Array, *given: Array) -> None:
        sizes = None
        if given:
            sizes = np.where(given[0], 0, size.value) if ignored else given[0]
        groups = np.full(lanes, _NOT_COMMITTED, "i8")
        if mask is not None:
            groups[~mask] = _DONE
        unit.copies.pending.append(Copy(sites, targets.astype("u8"), sources.astype("u8"), sizes, groups))

    return Operation(call, arguments=tuple(arguments))
