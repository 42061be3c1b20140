"""`shfl`, `vote`, `redux`, `activemask`: exchanges between lanes of a warp.

If a unit is a block, its lanes form several warps. Lanes that are not active, or not in the member mask, do not take
part. A value that is read from them is undefined; here it is the reader's own value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.instructions import Instruction, Integer, Operand, Pair
from tricomm.explorer.ptx.operations.memory_forms import unknown_form
from tricomm.explorer.ptx.operations.operation import KnownOperands, Operation
from tricomm.explorer.ptx.unit_view import UnitView

_WARP = 32
_ALL = (1 << _WARP) - 1


class WarpLanes:
    """The lanes of a unit, in rows of one warp each. If the last warp is not full, its missing lanes are never
    active."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.warps = -(-lanes // _WARP)
        self.lane = np.arange(lanes, dtype="i8") % _WARP
        self.first = np.arange(lanes, dtype="i8") - self.lane
        self.bits = (np.uint64(1) << self.lane.astype("u8")).astype("u8")

    def rows(self, values: Array, fill: Any) -> Array:
        """Values by lane as [warps, 32]."""
        if self.lanes == self.warps * _WARP:
            return values.reshape(self.warps, _WARP)
        padded = np.full(self.warps * _WARP, fill, values.dtype)
        padded[: self.lanes] = values
        return padded.reshape(self.warps, _WARP)

    def spread(self, by_warp: Array) -> Array:
        """One value per warp -> one per lane."""
        return np.repeat(by_warp, _WARP)[: self.lanes]

    def taking_part(self, mask: Array | None, members: Array) -> Array:
        """The active lanes that are in the member masks (one mask per lane)."""
        named: Array = np.not_equal(members.astype("u8") & self.bits, 0)
        return named if mask is None else named & mask

    def ballot(self, chosen: Array) -> Array:
        """The mask of chosen lanes of each lane's warp, uint32 per lane."""
        by_warp = np.bitwise_or.reduce(self.rows(np.where(chosen, self.bits, np.uint64(0)), 0), axis=1)
        return self.spread(by_warp).astype("u4")


def _modifiers(instruction: Instruction) -> tuple[str, ...]:
    if "sync" not in instruction.modifiers:
        raise unknown_form(instruction, "only the .sync form is known")
    return tuple(m for m in instruction.modifiers if m != "sync")


def shfl(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    mode = _modifiers(instruction)
    if len(mode) != 2 or mode[0] not in ("up", "down", "bfly", "idx") or mode[1] != "b32":
        raise unknown_form(instruction, "this form of shfl is not known")
    rows, (target, value, step, clamp, members) = WarpLanes(operands.unit.lanes), instruction.operands[:5]
    targets = (target.first, target.second) if isinstance(target, Pair) else (target,)
    kept: dict[tuple[bytes, bytes], tuple[Array, Array]] = {}

    def call(unit: UnitView, mask: Array | None, a: Array, b: Array, c: Array, named: Array) -> Any:
        key = (b.tobytes(), c.tobytes())
        if key not in kept:
            if len(kept) > 64:
                kept.clear()
            kept[key] = _partners(rows, mode[0], b.astype("i8"), c.astype("i8"))
        partner, inside = kept[key]
        received = a.take(partner)
        if mask is not None:
            received = np.where(mask.take(partner), received, a)
        return received if len(targets) == 1 else (received, inside)

    kinds = ("u4", "?")[: len(targets)]
    given: tuple[tuple[Operand, str], ...] = ((value, "u4"), (step, "u4"), (clamp, "u4"), (members, "u4"))
    return Operation(call, targets, kinds, arguments=given, waits=True, members=members)


def _partners(rows: WarpLanes, mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    lane, b, clamp, segment = rows.lane, b & 31, c & 31, c >> 8 & 31
    most, least = (lane & segment) | (clamp & ~segment & 31), lane & segment
    if mode == "up":
        other = lane - b
        inside = other >= most
    else:
        other = lane + b if mode == "down" else lane ^ b if mode == "bfly" else least | (b & ~segment & 31)
        inside = other <= most
    other = np.where(inside, other, lane) + rows.first
    return np.where(other < rows.lanes, other, lane + rows.first), inside


def vote(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    mode = _modifiers(instruction)
    if len(mode) != 2 or (mode[1] != ("b32" if mode[0] == "ballot" else "pred")):
        raise unknown_form(instruction, "this form of vote is not known")
    rows = WarpLanes(operands.unit.lanes)
    target, value, members = instruction.operands

    def ballot(unit: UnitView, mask: Array | None, p: Array, named: Array) -> Array:
        return rows.ballot(rows.taking_part(mask, named) & p)

    def decide(unit: UnitView, mask: Array | None, p: Array, named: Array) -> Array:
        part = rows.taking_part(mask, named)
        any_set: Array = np.any(rows.rows(part & p, False), axis=1)
        any_clear: Array = np.any(rows.rows(part & ~p, False), axis=1)
        by_warp = {"any": any_set, "all": ~any_clear, "uni": ~(any_set & any_clear)}[mode[0]]
        return rows.spread(by_warp)

    if mode[0] not in ("ballot", "any", "all", "uni"):
        raise unknown_form(instruction, "this form of vote is not known")
    given: tuple[tuple[Operand, str], ...] = ((value, "?"), (members, "u4"))
    function: Callable[..., Array] = ballot if mode[0] == "ballot" else decide
    kind = "u4" if mode[0] == "ballot" else "?"
    if _number(operands, partial, members):
        return Operation(_first(function), (target,), ("number",), arguments=given, waits=True, members=members)
    return Operation(function, (target,), (kind,), arguments=given, waits=True, members=members)


def _number(operands: KnownOperands, partial: bool, members: Operand) -> bool:
    """True if the result is the same in all lanes of the unit."""
    full = isinstance(members, Integer) and members.value & _ALL == _ALL
    return full and not partial and operands.unit.lanes <= _WARP


def _first(function: Callable[..., Array]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments).item(0)


_REDUCE: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


_INTEGER_FORMS = {(kind, name) for kind in ("u32", "s32") for name in ("add", "min", "max")}
_INTEGER_FORMS |= {("b32", name) for name in ("and", "or", "xor")}


def redux(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    mode = _modifiers(instruction)
    name, kind, extra = mode[0], mode[-1], mode[1:-1]
    rows = WarpLanes(operands.unit.lanes)
    target, value, members = instruction.operands
    given: tuple[tuple[Operand, str], ...]
    if kind == "f32" and name in ("min", "max") and set(extra) <= {"abs", "NaN"}:
        given = ((value, "f4"), (members, "u4"))
        function = _redux_float(rows, name, "abs" in extra, "NaN" in extra)
    elif not extra and (kind, name) in _INTEGER_FORMS:
        given = ((value, "i4" if kind == "s32" else "u4"), (members, "u4"))
        function = _redux_integer(rows, name, kind)
    else:
        raise unknown_form(instruction, "this form of redux is not known")
    if _number(operands, partial, members):
        return Operation(_first(function), (target,), ("number",), arguments=given, waits=True, members=members)
    return Operation(function, (target,), ("u4",), arguments=given, waits=True, members=members)


def _redux_integer(rows: WarpLanes, name: str, kind: str) -> Callable[..., Array]:
    reduce = _REDUCE[name].reduce
    info = np.iinfo("i4" if kind == "s32" else "u4")
    neutral = {"min": info.max, "max": info.min, "and": info.max}.get(name, 0)

    def call(unit: UnitView, mask: Array | None, a: Array, named: Array) -> Array:
        part = rows.taking_part(mask, named)
        chosen = np.where(part, a, a.dtype.type(neutral))
        by_warp = reduce(rows.rows(chosen, neutral), axis=1).astype(a.dtype)
        return rows.spread(by_warp).view("u4")

    return call


def _redux_float(rows: WarpLanes, name: str, absolute: bool, nan: bool) -> Callable[..., Array]:
    reduce = (np.fmin if name == "min" else np.fmax).reduce

    def call(unit: UnitView, mask: Array | None, a: Array, named: Array) -> Array:
        part = rows.taking_part(mask, named)
        values = np.abs(a) if absolute else a
        table = rows.rows(np.where(part, values, np.float32("nan")), np.float32("nan"))
        by_warp = reduce(table, axis=1)
        has_nan = rows.rows(part & np.isnan(values), False).any(axis=1)
        bad = np.isnan(by_warp) | (has_nan if nan else False)
        word = np.where(bad, np.uint32(0x7FFFFFFF), by_warp.view("u4"))
        return rows.spread(word)

    return call


def activemask(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    rows = WarpLanes(operands.unit.lanes)
    all_lanes = np.ones(rows.lanes, bool)
    return Operation(
        lambda unit, mask: rows.ballot(all_lanes if mask is None else mask), (instruction.operands[0],), ("u4",)
    )
