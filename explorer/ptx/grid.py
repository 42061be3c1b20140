"""Launches: the units of a grid as callables, and a round-robin runner for them."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import greenlet
import numpy as np

from tricomm.errors import InvalidArgument, TricommError
from tricomm.explorer.ptx import arithmetic
from tricomm.explorer.ptx.analysis.limits import check_launch
from tricomm.explorer.ptx.blocks import BarrierState, BlockState
from tricomm.explorer.ptx.generated.operand_code import Operands
from tricomm.explorer.ptx.instructions import PtxKernel
from tricomm.explorer.ptx.loaded_kernel import STEPS, LoadedKernel
from tricomm.explorer.ptx.operations.memory_forms import unknown_form
from tricomm.explorer.ptx.operations.table import CONTROL, MAKERS, make_operation
from tricomm.explorer.ptx.unit import Direct, Unit
from tricomm.explorer.ptx.unit_shape import WARP, UnitShape

__all__ = ["STEPS", "Deadlock", "LoadedKernel", "RoundRobin", "launch", "refuse_unknown", "run"]

Size = tuple[int, int, int]


class Deadlock(TricommError):
    """No unit of the launches that run together can continue."""


def refuse_unknown(kernel: PtxKernel) -> None:
    """Raises `InvalidArgument` with text, place and kernel for the first instruction that cannot be executed."""
    operands = Operands(kernel, UnitShape(WARP, True, (WARP, 1, 1)), {}, _Zeros())
    for instruction in kernel.instructions:
        try:
            if instruction.opcode in MAKERS:
                make_operation(instruction, operands, partial=True)
            elif instruction.opcode not in CONTROL and arithmetic.rule(instruction) is None:
                raise unknown_form(instruction, "this instruction is not known")
        except InvalidArgument as error:
            raise InvalidArgument(f"kernel {kernel.name}: {error}") from None
        except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"kernel {kernel.name}: {unknown_form(instruction, f'its operands are not understood ({error})')}"
            ) from error


class _Zeros(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return 0


def launch(
    loaded: LoadedKernel, grid: Size, threads: Size, shared_bytes: int, parameters: bytes, unit: str = "warp"
) -> list[BlockState]:
    """The blocks of a launch, with their units. `shared_bytes`: dynamic shared memory; `unit`: "warp" or "block".

    Raises `InvalidArgument` for sizes that no GPU of the kernel's architecture has.
    """
    kernel = loaded.kernel
    check_launch(kernel, grid, threads, shared_bytes)
    count = math.prod(threads)
    wanted = max((p.offset + p.size for p in kernel.parameters), default=0)
    if len(parameters) < wanted:
        raise InvalidArgument(f"{kernel.name} takes {wanted} bytes of parameters, not {len(parameters)}")
    blocks = []
    for z, y, x in itertools.product(range(grid[2]), range(grid[1]), range(grid[0])):
        block = BlockState((x, y, z), grid, count, (loaded.static_shared, shared_bytes), parameters)
        width = WARP if unit == "warp" else count
        for first in range(0, count, width):
            lanes = min(width, count - first)
            shape = UnitShape(lanes, unit == "warp", threads)
            block.units.append(Unit(loaded, block, np.arange(first, first + lanes, dtype="i8"), shape))
        blocks.append(block)
    return blocks


def run(launches: Sequence[Sequence[BlockState]], rounds: int | None = None) -> None:
    """Run all units of all launches in turns, until all have ended. `rounds` bounds how many turns each gets.

    Raises `Deadlock`, and what a unit raises.
    """
    RoundRobin([unit for blocks in launches for block in blocks for unit in block.units], rounds).run()


class RoundRobin:
    """Units as greenlets that take turns."""

    def __init__(self, units: Sequence[Callable[[Any], None]], rounds: int | None = None) -> None:
        self._rounds = rounds
        self._waiting: dict[Any, Callable[[], bool]] = {}
        self._all = [greenlet.greenlet(self._body(unit)) for unit in units]
        self._ready: deque[Any] = deque(self._all)

    def _body(self, unit: Callable[[Any], None]) -> Callable[[], None]:
        return lambda: unit(Direct(self._turn, self._block, self._park))

    def _turn(self) -> None:
        self._ready.append(greenlet.getcurrent())
        self._hub.switch()

    def _block(self, until: Callable[[], bool]) -> None:
        if not until():
            self._waiting[greenlet.getcurrent()] = until
            self._turn()

    def _park(self, state: BarrierState) -> None:
        me = greenlet.getcurrent()
        state.sleepers.append(lambda: self._ready.append(me))
        self._hub.switch()

    def run(self) -> None:
        """Run until all units have ended. Raises `Deadlock`, and what a unit raises."""
        self._hub = greenlet.getcurrent()
        left = None if self._rounds is None else self._rounds * len(self._all)
        blocked = 0
        try:
            while self._ready:
                one = self._ready.popleft()
                until = self._waiting.get(one) if self._waiting else None
                if until is not None and not until():
                    self._ready.append(one)
                    blocked += 1
                    if blocked > len(self._ready):
                        break
                    continue
                self._waiting.pop(one, None)
                blocked = 0
                one.switch()
                if left is not None:
                    left -= 1
                    if left < 0:
                        raise Deadlock(f"{self._alive()} units have not ended after {self._rounds} turns each")
            if self._alive():
                raise Deadlock(f"{self._alive()} units wait at barriers that will not open")
        finally:
            for one in self._all:
                if not one.dead:
                    one.throw(greenlet.GreenletExit)

    def _alive(self) -> int:
        return sum(not one.dead for one in self._all)
