"""`ldmatrix` and `stmatrix`: 8 by 8 matrices of 16 bits between shared memory and the lanes of a warp.

Lane 8 i + r gives the address of row r of matrix i. The register of lane n has elements 2 (n % 4) and 2 (n % 4) + 1 of
row n / 4; if transposed, of column n / 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.instructions import Address, Instruction
from tricomm.explorer.ptx.operations.load_store import MemorySite
from tricomm.explorer.ptx.operations.memory_forms import MemoryForm, flat, unknown_form
from tricomm.explorer.ptx.operations.operation import KnownOperands, Operation
from tricomm.explorer.ptx.unit_view import WARP, UnitView

_COUNT = {"x1": 1, "x2": 2, "x4": 4}


class Matrices:
    """The mapping between rows of `count` matrices and the registers of a unit's lanes."""

    def __init__(self, lanes: int, count: int) -> None:
        self.lanes, self.count = lanes, count
        self.lane = np.arange(lanes) % WARP
        self.first = np.arange(lanes) - self.lane
        self.has_row = self.lane < 8 * count

    def to_registers(self, rows: Array, transposed: bool) -> list[Array]:
        """The registers for rows, which are uint32 [lanes, 4]: for each matrix one uint32 per lane."""
        row, column = self.lane // 4, self.lane % 4
        registers = []
        for i in range(self.count):
            start = self.first + 8 * i
            if transposed:
                halves = rows.view("u2").astype("u4")
                low, high = halves[start + 2 * column, row], halves[start + 2 * column + 1, row]
                registers.append(low | high << np.uint32(16))
            else:
                registers.append(rows[start + row, column])
        return registers

    def to_rows(self, values: list[Array], transposed: bool) -> list[Array]:
        """The rows for registers: a row's four words, one array per word. Lanes without a row have 0."""
        halves = np.zeros((self.lanes, 8), "u2")
        for i, value in enumerate(values):
            mine = np.flatnonzero(self.lane // 8 == i)
            row, start = self.lane[mine] % 8, self.first[mine]
            parts = value.view("u2").reshape(-1, 2)
            for k in range(8):
                lane, half = (4 * k + row // 2, row % 2) if transposed else (4 * row + k // 2, k % 2)
                halves[mine, k] = parts[start + lane, half]
        words = halves.view("u4")
        return [np.ascontiguousarray(words[:, n]) for n in range(4)]


def matrix(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    modifiers = [m for m in instruction.modifiers if m not in ("sync", "aligned", "shared", "shared::cta", "trans")]
    if len(modifiers) != 3 or modifiers[0] != "m8n8" or modifiers[1] not in _COUNT or modifiers[2] != "b16":
        raise unknown_form(instruction, "this form is not known")
    loads, transposed = instruction.opcode == "ldmatrix", "trans" in instruction.modifiers
    registers, address = instruction.operands if loads else instruction.operands[::-1]
    if not isinstance(address, Address) or operands.unit.lanes % WARP:
        raise unknown_form(instruction, "whole warps and an address are expected")
    form = MemoryForm("load" if loads else "store", "", "shared", "b32", 4, 4, None, None, address, (), (), instruction)
    site = MemorySite(form, operands.unit.lanes, operands.address(address)[1])
    places = Matrices(operands.unit.lanes, _COUNT[modifiers[1]])

    def load(unit: UnitView, mask: Array | None, base: int | Array) -> Any:
        chosen = places.has_row if mask is None else places.has_row & mask
        rows = np.stack(site.load(unit, chosen, base), axis=1)
        registers = places.to_registers(np.ascontiguousarray(rows), transposed)
        return registers if len(registers) > 1 else registers[0]

    def store(unit: UnitView, mask: Array | None, base: int | Array, *values: Array) -> None:
        chosen = places.has_row if mask is None else places.has_row & mask
        site.store(unit, chosen, base, places.to_rows(list(values), transposed))

    named = flat((registers,))
    if loads:
        return Operation(load, named, ("u4",) * len(named), address, waits=True)
    return Operation(store, address=address, arguments=tuple((o, "u4") for o in named if o is not None), waits=True)
