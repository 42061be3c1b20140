"""`mbarrier`: barriers that are a word of shared memory.

The word is opaque to a kernel. Its bits here: 0 to 19 count the pending arrivals of this phase, 20 to 39 the arrivals
of each later phase, 40 to 61 the pending bytes (signed); 63 is the parity of the phase.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.generated.operand_code import Operands
from tricomm.explorer.ptx.instructions import Address, Instruction, Integer, Operand
from tricomm.explorer.ptx.operations.atomics import AtomicSite
from tricomm.explorer.ptx.operations.load_store import MemorySite
from tricomm.explorer.ptx.operations.memory_forms import SCOPES, MemoryForm, address_of, unknown_form
from tricomm.explorer.ptx.operations.operation import Operation
from tricomm.explorer.ptx.unit_view import UnitView

_COUNT, _BYTES = (1 << 20) - 1, (1 << 22) - 1


def _change(word: int, arrivals: int, octets: int, drop: bool = False) -> int:
    """Count `arrivals`, and expect `octets` more bytes; the next phase begins if nothing is pending."""
    missing, expected, parity = word & _COUNT, word >> 20 & _COUNT, word >> 63
    pending = ((word >> 40 & _BYTES) ^ (1 << 21)) - (1 << 21)
    missing, pending = missing - arrivals, pending + octets
    if drop:
        expected -= arrivals
    if missing <= 0 and pending == 0:
        missing, parity = expected, parity ^ 1
    return parity << 63 | (pending & _BYTES) << 40 | (expected & _COUNT) << 20 | (missing & _COUNT)


def _site(instruction: Instruction, address: Address, operands: Operands, change: Any, results: Any = ()) -> AtomicSite:
    sem = next((m for m in instruction.modifiers if m in ("relaxed", "release", "acquire")), "release")
    scope = next((m for m in instruction.modifiers if m in SCOPES), "cta")
    space = "shared" if any(m.startswith("shared") for m in instruction.modifiers) else ""
    kind = "rmw" if results else "red"
    form = MemoryForm(kind, "exch", space, "b64", 8, 1, sem, scope, address, results, (), instruction)
    site = AtomicSite(form, MemorySite(form, operands.unit.lanes, operands.address(address)[1]))
    site.change = change
    return site


def arrival_site(instruction: Instruction, address: Address, operands: Operands, counts: bool) -> AtomicSite:
    """The site of `cp.async.mbarrier.arrive`, which without `.noinc` first adds the arrival that it then makes."""
    return _site(
        instruction, address, operands, lambda old, given: _change(old, 1, 0) if counts else _change(old, 0, 0)
    )


def mbarrier(instruction: Instruction, operands: Operands, partial: bool) -> Operation:
    name = instruction.modifiers[0]
    make = {
        "init": _init,
        "inval": _init,
        "arrive": _arrive,
        "arrive_drop": _arrive,
        "expect_tx": _bytes,
        "complete_tx": _bytes,
        "test_wait": _wait,
        "try_wait": _wait,
        "pending_count": _pending,
    }.get(name)
    if make is None:
        raise unknown_form(instruction, "this operation on an mbarrier is not known")
    return make(instruction, operands)


def _init(instruction: Instruction, operands: Operands) -> Operation:
    first, *rest = instruction.operands
    address = address_of(instruction, first)
    space = "shared" if any(m.startswith("shared") for m in instruction.modifiers) else ""
    form = MemoryForm("store", "", space, "b64", 8, 1, None, None, address, (), tuple(rest), instruction)
    site = MemorySite(form, operands.unit.lanes, operands.address(address)[1])

    def call(unit: UnitView, mask: Array | None, base: int | Array, *count: Array) -> None:
        words = count[0].astype("u8") if count else np.zeros(unit.shape.lanes, "u8")
        site.store(unit, mask, base, [words | (words << np.uint64(20))])

    return Operation(call, address=address, arguments=tuple((o, "u4") for o in rest))


def _arrive(instruction: Instruction, operands: Operands) -> Operation:
    given = list(instruction.operands)
    state: Operand | None = None
    if not isinstance(given[0], Address):
        state = given.pop(0)
    first, *rest = given
    address = address_of(instruction, first)
    drop, expects = instruction.modifiers[0] == "arrive_drop", "expect_tx" in instruction.modifiers

    def change(old: int, numbers: tuple[int, ...]) -> int:
        return _change(old, 1, numbers[0], drop) if expects else _change(old, numbers[0], 0, drop)

    site = _site(instruction, address, operands, change, (state,))
    count = rest[0] if rest else Integer(1)

    def call(unit: UnitView, mask: Array | None, base: int | Array, number: Array) -> Any:
        return site.call(unit, mask, base, number.astype("u8"))

    return Operation(call, (state,), ("u8",), address, ((count, "u4"),), strong=True)


def _bytes(instruction: Instruction, operands: Operands) -> Operation:
    first, octets = instruction.operands
    address = address_of(instruction, first)
    sign = 1 if instruction.modifiers[0] == "expect_tx" else -1
    site = _site(instruction, address, operands, lambda old, given: _change(old, 0, sign * given[0]))

    def call(unit: UnitView, mask: Array | None, base: int | Array, number: Array) -> None:
        site.call(unit, mask, base, number.astype("u8"))

    return Operation(call, address=address, arguments=((octets, "u4"),), strong=True)


def _wait(instruction: Instruction, operands: Operands) -> Operation:
    """A `try_wait` may return at once; a loop around it lets others run."""
    target, second, given = instruction.operands[:3]
    address = address_of(instruction, second)
    relaxed = "relaxed" in instruction.modifiers
    scope = next((m for m in instruction.modifiers if m in SCOPES), "cta")
    space = "shared" if any(m.startswith("shared") for m in instruction.modifiers) else ""
    sem = "relaxed" if relaxed else "acquire"
    form = MemoryForm("load", "", space, "b64", 8, 1, sem, scope, address, (), (), instruction)
    site = MemorySite(form, operands.unit.lanes, operands.address(address)[1])
    by_parity = "parity" in instruction.modifiers

    def call(unit: UnitView, mask: Array | None, base: int | Array, wanted: Array) -> Array:
        parity = site.load(unit, mask, base)[0] >> np.uint64(63)
        phase = wanted.astype("u8") & np.uint64(1) if by_parity else wanted >> np.uint64(63)
        complete: Array = np.not_equal(parity, phase)
        return complete

    return Operation(call, (target,), ("?",), address, ((given, "u4" if by_parity else "u8"),), strong=True)


def _pending(instruction: Instruction, operands: Operands) -> Operation:
    target, state = instruction.operands
    return Operation(
        lambda unit, mask, word: (word & np.uint64(_COUNT)).astype("u4"), (target,), ("u4",), arguments=((state, "u8"),)
    )
