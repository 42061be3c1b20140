"""Loads whose values are never used: redundant loads of a tile's elements by threads that do not store the result.

If a tile has fewer elements than the block has threads, several threads load the same element, and one of them stores
the result. Formally, this store then races with the loads of the other threads. A racing load in PTX returns some
value; it is not undefined behaviour (ISA 8.10). So the race is harmless if that value reaches no memory, no address, no
branch and no other thread.

The kernel's text shows which instructions a loaded value may reach: all that its registers flow into, in any order. If
these are only stores, a thread uses the value when it executes one of them, with its guard true, after the load. This
overestimates the uses, so no race is missed. Otherwise the value counts as used at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tricomm.explorer.compiled.thread_clocks import MOST_THREADS, Array
from tricomm.explorer.ptx.analysis.liveness import read, written
from tricomm.explorer.ptx.arithmetic import OPCODES
from tricomm.explorer.ptx.instructions import Instruction, PtxKernel, registers_of
from tricomm.explorer.report.findings import Finding


class UnusedLoads:
    """The races with possibly unused loads of one execution. `report` is called with each whose value is used."""

    def __init__(self, report: Callable[[Finding], None]) -> None:
        self._report = report
        self._ran: dict[int, Array] = {}  # by store: the event at which each thread executed it last
        self._waiting: dict[int, list[tuple[int, int, Callable[[], Finding]]]] = {}  # by store: thread, load, race

    def ran(self, instruction: Instruction, slots: Array, event: int) -> None:
        """Threads have executed an instruction that writes memory, which may use loaded values."""
        last = self._ran.get(id(instruction))
        if last is None:
            last = self._ran[id(instruction)] = np.zeros(MOST_THREADS + 1, np.int32)
        last[slots] = event
        waiting = self._waiting.get(id(instruction))
        if waiting:
            for slot, load, race in waiting:
                if load < event and (slots == slot).any():
                    self._report(race())

    def judge(
        self, kernel: PtxKernel, instruction: Instruction, slot: int, load: int, race: Callable[[], Finding]
    ) -> None:
        """Decide about a race with a load by thread `slot` at event `load`: it is reported now, later or never."""
        stores = _stores_reached(kernel, instruction)
        if stores is None or any(self._since(store, slot) > load for store in stores):
            self._report(race())
            return
        for store in stores:
            waiting = self._waiting.setdefault(id(store), [])
            if len(waiting) < MOST_THREADS and all((s, n) != (slot, load) for s, n, _ in waiting):
                waiting.append((slot, load, race))

    def _since(self, store: Instruction, slot: int) -> int:
        last = self._ran.get(id(store))
        return 0 if last is None else int(last[slot])


_reached: dict[int, tuple[Instruction, tuple[Instruction, ...] | None]] = {}  # holds the loads: their ids stay unique
_MOST_LOADS = 1 << 15


def _stores_reached(kernel: PtxKernel, load: Instruction) -> tuple[Instruction, ...] | None:
    """The stores whose data the loaded value may reach. None if it may reach anything else."""
    entry = _reached.get(id(load))
    if entry is None:
        if len(_reached) >= _MOST_LOADS:
            _reached.clear()
        entry = _reached[id(load)] = load, _slice(kernel, load)
    return entry[1]


def _slice(kernel: PtxKernel, load: Instruction) -> tuple[Instruction, ...] | None:
    tainted = set(written(load))
    stores: dict[int, Instruction] = {}
    grew = True
    while grew:
        grew = False
        for instruction in kernel.instructions:
            if tainted.isdisjoint(read(instruction)):
                continue
            guarded = instruction.guard is not None and instruction.guard[0].name in tainted
            if instruction.opcode == "st" and not guarded:
                if not tainted.isdisjoint(register.name for register in registers_of(instruction.operands[0])):
                    return None
                stores[id(instruction)] = instruction
            elif instruction.opcode in OPCODES:  # a pure function of the thread's registers
                results = set(written(instruction))
                grew |= not results <= tainted
                tainted |= results
            else:  # uses the value at once
                return None
    return tuple(stores.values())
