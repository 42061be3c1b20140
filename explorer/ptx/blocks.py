"""A block: its shared memory, its units, and its barriers by number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.global_memory import AddressRange

_SLACK = 128


class BarrierState:
    """A barrier of a block. `generation` counts how often it has opened."""

    def __init__(self) -> None:
        self.arrived = 0
        self.generation = 0
        self.count: int | None = None  # of the present round, if the instruction gave it
        self.values: list[int] = []  # 0 or 1, one per contributing thread
        self.results: dict[int, list[int]] = {}

    def open(self) -> None:
        self.arrived = 0
        if self.values:
            self.results[self.generation], self.values = self.values, []
            self.results.pop(self.generation - 2, None)
        self.generation += 1


@dataclass(eq=False)
class BarrierRequest:
    """Threads of a unit at a barrier. `kind` is "sync", "red" or "arrive". A `count` of None stands for the whole
    block."""

    block: BlockState
    kind: str
    number: int
    count: int | None
    threads: Array
    lanes: int
    state: BarrierState
    generation: int = 0
    reduction: str = ""
    values: list[int] = field(default_factory=list)

    def contribute(self, reduction: str, predicate: Array, mask: Array | None) -> None:
        self.reduction = reduction
        self.values = (predicate if mask is None else predicate[mask]).astype(int).tolist()

    def arrive(self) -> None:
        self.generation = self.state.generation
        self.state.arrived += self.lanes
        self.state.count = self.count
        self.state.values += self.values
        self.block.open_if_full(self.state)

    def is_open(self) -> bool:
        return self.state.generation != self.generation

    def result(self, width: int) -> Array:
        """The result of `bar.red` for each of the unit's `width` lanes."""
        values = self.state.results.get(self.generation, [0])
        if self.reduction == "popc":
            return np.full(width, sum(values), "u4")
        return np.full(width, all(values) if self.reduction == "and" else any(values))


class BlockState:
    """The state of one block. `index` of the block and size of the `grid`, in blocks (x, y, z); `number` of the block
    in the grid; `threads`, the number of threads."""

    def __init__(
        self,
        index: tuple[int, int, int],
        grid: tuple[int, int, int],
        threads: int,
        shared: tuple[int, int],
        parameters: bytes,
    ) -> None:
        self.index, self.grid, self.threads, self.parameters = index, grid, threads, parameters
        self.number = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        static, self.dynamic_shared = shared
        self.shared_region = array_region(static + self.dynamic_shared, "shared memory")
        self.shared = self.shared_region.views[1]
        self.barriers: dict[int, BarrierState] = {}
        self.units: list[Any] = []  # of `unit.Unit`
        self.exited = 0

    def barrier(self, number: int) -> BarrierState:
        if number not in self.barriers:
            self.barriers[number] = BarrierState()
        return self.barriers[number]

    def open_if_full(self, state: BarrierState) -> None:
        expected = self.threads - self.exited if state.count is None else state.count
        if 0 < expected <= state.arrived:
            state.open()

    def leave(self, threads: int) -> None:
        """`threads` threads have ended. Barriers of the whole block no longer wait for them."""
        self.exited += threads
        for state in self.barriers.values():
            if state.arrived and state.count is None:
                self.open_if_full(state)


def array_region(nbytes: int, name: str) -> AddressRange:
    """A region of new memory, all zeros, with addresses from 0."""
    memory = np.zeros(nbytes + _SLACK + 16, "u1")
    offset = -memory.ctypes.data % _SLACK
    return AddressRange(memory[offset : offset + nbytes], 0, name)
