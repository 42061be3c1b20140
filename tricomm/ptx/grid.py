"""Launches: the units of a grid as callables, and a round-robin runner for them."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import greenlet
import numpy as np

from tricomm.errors import InvalidArgument, TricommError
from tricomm.ptx import arithmetic
from tricomm.ptx.blocks import BlockState
from tricomm.ptx.generated.kernel_code import KernelCode
from tricomm.ptx.generated.operand_code import Operands
from tricomm.ptx.global_memory import GlobalMemory
from tricomm.ptx.instructions import Kernel
from tricomm.ptx.limits import check_launch
from tricomm.ptx.operations.memory_forms import unknown_form
from tricomm.ptx.operations.table import CONTROL, MAKERS, make_operation
from tricomm.ptx.special_registers import WARP, UnitShape
from tricomm.ptx.unit import STEPS, Direct, Unit

Size = tuple[int, int, int]


class Deadlock(TricommError):
    """No unit of the launches that run together can go on."""


def refuse_unknown(kernel: Kernel) -> None:
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
        except (IndexError, ValueError, StopIteration) as error:
            raise InvalidArgument(
                f"kernel {kernel.name}: {unknown_form(instruction, f'its operands are not understood ({error})')}"
            ) from error


class _Zeros(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return 0


@dataclass
class LoadedKernel:
    """A kernel with its variables in memory, ready to be launched.

    steps   how often a unit may go through loops
    timed   its units tell their surroundings of each basic block that they enter: `passes(number)`
    """

    kernel: Kernel
    memory: GlobalMemory
    watch_shared: bool = False
    steps: int = STEPS
    timed: bool = False
    addresses: dict[str, int] = field(init=False)
    static_shared: int = field(init=False, default=0)
    local_bytes: int = field(init=False, default=0)
    constants: GlobalMemory = field(init=False, default_factory=GlobalMemory)

    def __post_init__(self) -> None:
        self.addresses = {p.name: p.offset for p in self.kernel.parameters}
        self._kept: list[Any] = []
        variables = sorted(self.kernel.variables.values(), key=lambda v: v.size == 0)  # what is dynamic comes last
        for variable in variables:
            if variable.space == "shared":
                self.static_shared = -(-self.static_shared // variable.align) * variable.align
                self.addresses[variable.name] = self.static_shared
                self.static_shared += variable.size
            elif variable.space == "local":
                self.local_bytes = -(-self.local_bytes // variable.align) * variable.align
                self.addresses[variable.name] = self.local_bytes
                self.local_bytes += variable.size
            elif variable.space in ("const", "global"):
                self._place(variable.name, variable.size, variable.align, variable.data, variable.space)
        self.local_bytes = -(-self.local_bytes // 16) * 16

    def _place(self, name: str, size: int, align: int, data: bytes, space: str) -> None:
        align = max(align, 16)
        raw = np.zeros(size + align + 16, "u1")
        base = -(-raw.ctypes.data // align) * align
        raw[base - raw.ctypes.data :][: len(data)] = np.frombuffer(data, "u1")
        self._kept.append(raw)
        (self.constants if space == "const" else self.memory).add(base, size, f"variable {name}")
        self.addresses[name] = base

    def code(self, shape: UnitShape) -> KernelCode:
        own = self if self._kept else None  # its code has the addresses of its variables
        return _code(self, shape, own)


_codes: dict[tuple[int, int, UnitShape, bool], KernelCode] = {}
_making = threading.Lock()


def _code(loaded: LoadedKernel, shape: UnitShape, own: object) -> KernelCode:
    key = (id(loaded.kernel), id(own) if own is not None else 0, shape, loaded.timed)
    with _making:
        if key not in _codes:
            # The code refers to its kernel: the number stays the kernel's own.
            _codes[key] = KernelCode(loaded.kernel, shape, loaded.addresses, loaded.timed)
            if own is not None:
                weakref.finalize(own, _codes.pop, key, None)
        return _codes[key]


def launch(
    loaded: LoadedKernel, grid: Size, threads: Size, shared_bytes: int, parameters: bytes, unit: str = "warp"
) -> list[BlockState]:
    """The blocks of a launch, with their units. `shared_bytes` are dynamic ones; `unit` is "warp" or "block".

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
    Turns([unit for blocks in launches for block in blocks for unit in block.units], rounds).run()


class Turns:
    """Units as greenlets that take turns."""

    def __init__(self, units: Sequence[Callable[[Any], None]], rounds: int | None = None) -> None:
        self._rounds = rounds
        self._waiting: dict[Any, Callable[[], bool]] = {}
        self._ready: deque[Any] = deque()
        for unit in units:
            self._ready.append(greenlet.greenlet(self._body(unit)))

    def _body(self, unit: Callable[[Any], None]) -> Callable[[], None]:
        return lambda: unit(Direct(self._turn, self._block))

    def _turn(self) -> None:
        self._hub.switch()

    def _block(self, until: Callable[[], bool]) -> None:
        if not until():
            self._waiting[greenlet.getcurrent()] = until
            self._hub.switch()

    def run(self) -> None:
        self._hub = greenlet.getcurrent()
        left = None if self._rounds is None else self._rounds * len(self._ready)
        blocked = 0
        try:
            while self._ready:
                one = self._ready.popleft()
                until = self._waiting.get(one)
                if until is not None and not until():
                    self._ready.append(one)
                    blocked += 1
                    if blocked > len(self._ready):
                        raise Deadlock(f"{len(self._ready)} units wait at barriers that will not open")
                    continue
                self._waiting.pop(one, None)
                blocked = 0
                one.switch()
                if not one.dead:
                    self._ready.append(one)
                if left is not None:
                    left -= 1
                    if left < 0:
                        raise Deadlock(f"{len(self._ready)} units have not ended after {self._rounds} turns each")
        finally:
            for one in self._ready:
                one.throw(greenlet.GreenletExit)
