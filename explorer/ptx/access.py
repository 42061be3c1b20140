"""The interface between a running warp and its surroundings: memory accesses, ordering, time, and turns for other
warps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from tricomm.explorer.ptx.instructions import Instruction

Array = NDArray[Any]


@dataclass(slots=True)
class ThreadAccess:
    """One memory instruction of one warp (or of a whole block as the unit) that is about to be performed.

    kind        "load", "store", "rmw" (atom), "red" (an rmw without a result) or "cas".
    op          the operation of an rmw or red: "add", "exch", "min", ...
    space       "global" or "shared" (generic addresses have been resolved).
    threads     int64 [n]: the numbers in the block of the threads that take part.
    addresses   uint64 [n]: the first byte of each thread's access; for shared memory its offset in the block's memory.
    width       bytes that one thread accesses at once: `elements` * `itemsize`.
    elements    number of elements of a vector access (.v2, .v4, .v8); 1 for a scalar, also for `.b128`.
    sem         None for a weak access, else "volatile", "relaxed", "acquire", "release" or "acq_rel".
    scope       None for a weak access, else "cta", "cluster", "gpu" or "sys".
    perform     performs the access for all threads, or for those that a bool [n] selects. For a load, rmw or cas it
                returns the old values as uint8 [n, width]. A second call reads memory again.
    supply      for a load: use these values (uint8 [n, width]) instead of the present ones.
    stored      for a store: its values, uint8 [n, width].
    """

    kind: str
    op: str
    space: str
    threads: Array
    addresses: Array
    itemsize: int
    elements: int
    sem: str | None
    scope: str | None
    instruction: Instruction
    perform: Callable[[Array | None], Array | None] = field(repr=False)
    supply: Callable[[Array], None] | None = field(default=None, repr=False)
    stored: Callable[[], Array] | None = field(default=None, repr=False)

    @property
    def width(self) -> int:
        return self.itemsize * self.elements

    @property
    def multicast(self) -> bool:
        """True if the address stands for memory of several GPUs. This is the access to one of them."""
        return self.instruction.opcode == "multimem"

    @property
    def reads(self) -> bool:
        return self.kind in ("load", "rmw", "cas")

    @property
    def writes(self) -> bool:
        return self.kind != "load"


class Surroundings(Protocol):
    """The surroundings of one unit (a warp or a block). It calls them in program order. Any call may let other units
    run."""

    def access(self, access: ThreadAccess) -> None:
        """Perform an access, by a call of `access.perform` or `access.supply`: before this returns if it reads,
        otherwise at any time."""

    def fence(self, sem: str, scope: str, threads: Array, instruction: Instruction) -> None:
        """Execute `fence.sc|acq_rel.scope` or `membar`. `sem` is "sc", "acq_rel", or "alias" for
        `fence.proxy.alias`."""

    def barrier(self, number: int, threads: Array, instruction: Instruction) -> None:
        """A barrier of the block has opened for these threads of this unit: all expected threads have arrived."""

    def arrive(self, number: int, threads: Array, instruction: Instruction) -> None:
        """These threads have arrived at barrier `number` (also `bar.arrive`, which does not wait)."""

    def wait(self, until: Callable[[], bool], instruction: Instruction) -> None:
        """Let other units run until `until()` is true. Raises if it cannot become true."""

    def warp_barrier(self, threads: Array, instruction: Instruction) -> None:
        """Execute `bar.warp.sync`. Not called for `shfl.sync` and the like, which do not order memory."""

    def wait_for_launches(self, threads: Array, instruction: Instruction) -> None:
        """Execute `griddepcontrol.wait`: return when the launch that this one depends on has ended."""

    def launch_dependents(self) -> None:
        """Execute `griddepcontrol.launch_dependents`: dependent launches need not wait for the end of this block."""

    def nanotime(self) -> int:
        """`%globaltimer`, in nanoseconds; also the basis of `%clock64`."""
