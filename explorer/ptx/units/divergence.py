"""Runs diverged lanes of a unit until they reconverge.

The groups of lanes take turns. Lanes that a branch has divided wait for each other at its reconvergence point. But they
continue if the missing lanes are waiting for a barrier or for a word in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tricomm.errors import TricommError
from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.analysis.control_flow import target
from tricomm.explorer.ptx.blocks import BarrierRequest
from tricomm.explorer.ptx.generated.kernel_code import Piece
from tricomm.explorer.ptx.instructions import Register
from tricomm.explorer.ptx.unit_view import WARP, UnitView

_PATIENCE = 64


@dataclass(eq=False)
class Meeting:
    """A reconvergence point, instruction `place`. `missing` lanes have neither arrived nor ended yet."""

    place: int
    outer: tuple[Meeting, ...]
    missing: Array
    arrived: Array


@dataclass(eq=False)
class LaneGroup:
    """Lanes that run together. `waiting`: they wait at a barrier. `meets`: they wait at an instruction that needs other
    lanes."""

    mask: Array
    index: int
    meetings: tuple[Meeting, ...]
    passed: bool = False
    waiting: BarrierRequest | None = None
    meets: bool = False


class Divergence:
    """A divergence at instruction `at`, whose branch or guard is true only for the lanes `chosen`."""

    def __init__(self, unit: UnitView, at: int, chosen: Array, registers: list[Any]) -> None:
        self.unit, self.code = unit, unit.code
        self.registers = self.code.to_arrays(registers)
        self.alive = np.ones(unit.shape.lanes, bool)
        self.parts: list[LaneGroup] = []
        self.meetings: list[Meeting] = []
        self.patience = _PATIENCE
        self._divide(LaneGroup(self.alive.copy(), at, ()), chosen)

    def run(self) -> tuple[int, list[Any]] | None:
        """Run the lanes. Returns the block at which all continue together, and their registers; None if all have
        ended."""
        while self.parts or self.meetings:
            if (back := self._together()) is not None:
                return back
            part = next((p for p in self.parts if p.waiting is None and not p.meets), None)
            if part is None:
                self._unblock()
                continue
            self.parts.remove(part)
            self._step(part)
        return None

    def _together(self) -> tuple[int, list[Any]] | None:
        if len(self.parts) != 1 or not self.unit.is_whole(self.parts[0].mask):
            return None
        part, flow = self.parts[0], self.code.flow
        if part.passed or part.waiting is not None or part.meets:
            return None
        number = flow.block_of(part.index)
        if number == flow.exit or flow.blocks[number].start != part.index:
            return None
        registers = self.code.from_arrays(self.registers, part.index)
        return None if registers is None else (number, registers)

    def _step(self, part: LaneGroup) -> None:
        """Run a piece of the code for `part` and append it to the queue."""
        piece = self.code.piece(part.index, part.passed)
        if piece.stop == "barrier":
            self._at_barrier(part, piece)
            return
        if piece.stop == "meet" and not self._all_there(part):
            part.meets = True
            self.parts.append(part)
            return
        taken = piece.run(self.unit, part.mask, self.registers)
        if piece.stop == "guard":
            self._divide(part, taken)
        elif piece.stop == "jump":
            self._jump(part)
        elif piece.stop == "leave":
            self._leave(part)
        elif piece.stop == "trap":
            self.unit.trap(part.index)
        else:
            self._place(part, piece.end)
            if piece.stop == "strong":
                self._be_patient()

    def _place(self, part: LaneGroup, index: int) -> None:
        """Let `part` continue at `index`, or wait there for the other lanes of its meeting."""
        part.index, part.passed = index, False
        if index >= len(self.code.kernel.instructions):
            self._leave(part)
        elif part.meetings and part.meetings[-1].place == index:
            meeting = part.meetings[-1]
            meeting.arrived |= part.mask
            self._no_longer_missing(meeting, part.mask)
        else:
            self.parts.append(part)

    def _no_longer_missing(self, meeting: Meeting, lanes: Array) -> None:
        meeting.missing &= ~lanes
        if not meeting.missing.any() and meeting in self.meetings:
            self.meetings.remove(meeting)
            self._release(meeting)

    def _release(self, meeting: Meeting) -> None:
        """Let the lanes that have arrived continue."""
        if meeting.arrived.any():
            lanes, meeting.arrived = meeting.arrived, np.zeros_like(meeting.arrived)
            self._place(LaneGroup(lanes, meeting.place, meeting.outer), meeting.place)

    def _divide(self, part: LaneGroup, chosen: Array | bool) -> None:
        """Split `part`: lanes `chosen` pass the guard of the instruction at its place, the others do not."""
        yes = part.mask & chosen
        no = part.mask & ~yes
        place, branch = part.index, self.code.kernel.instructions[part.index].opcode == "bra"
        if yes.any() and no.any():
            flow = self.code.flow
            after = flow.reconvergence[flow.block_of(place)] if branch else flow.exit
            meet = (flow.blocks[after].start if after != flow.exit else None) if branch else place + 1
            if meet is not None and not (part.meetings and part.meetings[-1].place == meet):
                meeting = Meeting(meet, part.meetings, part.mask.copy(), np.zeros_like(part.mask))
                self.meetings.append(meeting)
                part.meetings = (*part.meetings, meeting)
        if yes.any():
            self.parts.append(LaneGroup(yes, place, part.meetings, passed=True))
        if no.any():
            self._place(LaneGroup(no, place, part.meetings), place + 1)

    def _jump(self, part: LaneGroup) -> None:
        index = target(self.code.kernel, self.code.kernel.instructions[part.index])
        if index <= part.index:
            self.unit.steps -= 1
            if self.unit.steps < 0:
                self.unit.out_of_steps(part.index)
        self._place(part, index)

    def _leave(self, part: LaneGroup) -> None:
        self.alive &= ~part.mask
        for meeting in reversed(part.meetings):
            self._no_longer_missing(meeting, part.mask)
        self.unit.block.leave(int(part.mask.sum()))
        self._look_again()

    def _at_barrier(self, part: LaneGroup, piece: Piece) -> None:
        unit = self.unit
        if part.waiting is None:
            unit.deferred = True
            piece.run(unit, part.mask, list(self.registers))
            unit.deferred = False
            part.waiting = unit.request
            unit.request = None
        request = part.waiting
        assert request is not None
        if request.kind != "arrive" and not request.is_open():
            self.parts.append(part)
            return
        self._finish_barrier(part, piece, request)

    def _finish_barrier(self, part: LaneGroup, piece: Piece, request: BarrierRequest) -> None:
        unit, part.waiting = self.unit, None
        unit.opened = request
        piece.run(unit, part.mask, self.registers)
        unit.opened = None
        self._place(part, piece.end)

    def _all_there(self, part: LaneGroup) -> bool:
        """True if all lanes that an instruction needs have reached it or ended. They become one part."""
        needed = self._members(part) & self.alive
        if not (needed & ~part.mask).any():
            return True
        here = [p for p in self.parts if p.index == part.index and p.meets]
        present = part.mask.copy()
        for other in here:
            present |= other.mask
        if (needed & ~present).any():
            return False
        for other in here:
            self.parts.remove(other)
            self._join(part, other)
        return True

    def _join(self, part: LaneGroup, other: LaneGroup) -> None:
        common = tuple(m for m in part.meetings if m in other.meetings)
        gone = [(m, part.mask) for m in part.meetings if m not in common]
        gone += [(m, other.mask) for m in other.meetings if m not in common]
        part.mask, part.meetings = part.mask | other.mask, common
        for meeting, lanes in gone:
            self._no_longer_missing(meeting, lanes)

    def _members(self, part: LaneGroup) -> Array:
        """The lanes in the instruction's member masks, within the warps of the part."""
        operation = self.code.masked_operation(part.index)
        lanes = np.arange(self.unit.shape.lanes)
        warps, lane = lanes // WARP, lanes % WARP
        members = operation.members
        if isinstance(members, Register):
            values = self.registers[self.code.place(members)].view("u4")
            named = np.zeros(len(lanes), bool)
            for warp in np.unique(warps[part.mask]).tolist():
                mask = int(np.bitwise_or.reduce(values[part.mask & (warps == warp)]))
                named |= (warps == warp) & ((mask >> lane) & 1).astype(bool)
            return named
        mask = getattr(members, "value", -1) & 0xFFFFFFFF
        member_lanes: Array = np.isin(warps, warps[part.mask]) & ((mask >> lane) & 1).astype(bool)
        return member_lanes

    def _unblock(self) -> None:
        """No part can run. Resume a part whose barrier has opened, else lanes that wait for others, else let other
        units run."""
        ready = [p for p in self.parts if p.waiting is not None and p.waiting.is_open()]
        if ready:
            part = ready[0]
            self.parts.remove(part)
            request = part.waiting
            assert request is not None
            self._finish_barrier(part, self.code.piece(part.index, part.passed), request)
            return
        if self._release_some():
            self._look_again()
            return
        waiting = [p.waiting for p in self.parts if p.waiting is not None]
        if waiting:
            self.unit.surroundings.wait(
                lambda: any(r.is_open() for r in waiting), self.code.kernel.instructions[self.parts[0].index]
            )
            return
        lines = ", ".join(str(self.code.kernel.instructions[p.index].line) for p in self.parts)
        raise LanesApart(
            f"{self.code.kernel.name}: lanes wait for each other at different instructions (PTX lines {lines})"
        )

    def _release_some(self) -> bool:
        for meeting in reversed(self.meetings):
            if meeting.arrived.any():
                self._release(meeting)
                return True
        return False

    def _look_again(self) -> None:
        for part in self.parts:
            part.meets = False

    def _be_patient(self) -> None:
        """After a while, resume the lanes that wait for polling lanes, because they may have to write the polled
        word."""
        self.patience -= 1
        if self.patience == 0:
            self.patience = _PATIENCE
            if self._release_some():
                self._look_again()


class LanesApart(TricommError):
    """Lanes of a warp wait for each other at different instructions: a deadlock."""
