"""The shape of a unit, for which code is generated, and the interface that operations and diverged lanes have to a
unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tricomm.explorer.ptx.access import Array, ThreadAccess
from tricomm.explorer.ptx.blocks import BarrierRequest, BlockState
from tricomm.explorer.ptx.global_memory import AddressRange, GlobalMemory
from tricomm.explorer.ptx.instructions import Instruction

WARP = 32


@dataclass(frozen=True, slots=True)
class UnitShape:
    """The shape of units of `lanes` threads. The last warp of a block may have fewer lanes than others, so another
    shape.

    warp      True if the unit is a warp, False if it is the whole block
    threads   threads of a block, (x, y, z)
    """

    lanes: int
    warp: bool
    threads: tuple[int, int, int]

    @property
    def flat(self) -> bool:
        return self.threads[1] == self.threads[2] == 1


class UnitView(Protocol):
    """The interface of a unit. `unit.Unit` implements it, and documents its methods.

    watched     whether the surroundings see accesses, by space.
    constants   memory of `.const` variables; `local_bytes`: bytes of local memory of a lane.
    copies      the pending copies of cp.async, an `operations.async_copies.Copies`.
    code        a `generated.kernel_code.KernelCode`.
    deferred    diverged lanes arrive at a barrier without waiting; `opened`: it has opened for them.
    """

    block: BlockState
    memory: GlobalMemory
    constants: GlobalMemory
    local_bytes: int
    threads: Array
    shape: UnitShape
    watched: dict[str, bool]
    copies: Any
    code: Any
    steps: int
    surroundings: Any
    deferred: bool
    opened: BarrierRequest | None
    request: BarrierRequest | None

    @property
    def local_region(self) -> AddressRange: ...

    @property
    def local_offsets(self) -> Array: ...

    def thread_index(self, axis: int) -> Array: ...

    def is_whole(self, mask: Array) -> bool: ...

    def tell(self, access: ThreadAccess) -> None: ...

    def clock(self) -> int: ...

    def fence(self, sem: str, scope: str, mask: Array | None, instruction: Instruction) -> None: ...

    def warp_barrier(self, mask: Array | None, instruction: Instruction) -> None: ...

    def wait_for_launches(self, mask: Array | None, instruction: Instruction) -> None: ...

    def launch_dependents(self) -> None: ...

    def barrier_request(
        self, kind: str, number: int, count: int | None, mask: Array | None, instruction: Instruction
    ) -> BarrierRequest: ...

    def pass_barrier(self, request: BarrierRequest) -> Any: ...

    def out_of_steps(self, index: int) -> None: ...

    def trap(self, index: int) -> None: ...
