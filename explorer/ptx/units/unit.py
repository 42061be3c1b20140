"""Runs one unit, a warp or a block, from its first instruction to its last."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from tricomm.errors import TricommError
from tricomm.explorer.ptx.access import Array, Surroundings, ThreadAccess
from tricomm.explorer.ptx.blocks import BarrierRequest, BlockState, array_region
from tricomm.explorer.ptx.global_memory import BadAddress, GlobalMemory
from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.ptx.operations.async_copies import Copies
from tricomm.explorer.ptx.operations.memory_forms import MemoryForm, place_of
from tricomm.explorer.ptx.unit_view import WARP, UnitShape
from tricomm.explorer.ptx.units.divergence import Divergence
from tricomm.explorer.ptx.units.loaded_kernel import LoadedKernel


class StepLimit(TricommError):
    """A kernel made more loop iterations than allowed. The message has the lines of the loop that it is in.

    where   file:line of the first of these lines, if there is one
    """

    where: str | None = None


class KernelTrap(TricommError):
    """A kernel executed `trap`."""


class Unit:
    """The threads `threads` of `block`. A call runs them. The registers of diverged lanes are in `divergence`."""

    def __init__(self, program: LoadedKernel, block: BlockState, threads: Array, shape: UnitShape) -> None:
        self.program, self.block, self.threads, self.shape = program, block, threads, shape
        self.memory: GlobalMemory = program.memory
        self.constants, self.local_bytes = program.constants, program.local_bytes
        self.code = program.code(shape)
        self.steps = program.steps
        self.watched = {"global": True, "shared": program.watch_shared, "local": False, "const": False}
        self.surroundings: Any = None
        self.deferred = False
        self.opened: BarrierRequest | None = None
        self.request: BarrierRequest | None = None
        self.copies = Copies(shape.lanes)

    def __call__(self, surroundings: Surroundings) -> None:
        """Run to the end. Raises `StepLimit`, `KernelTrap`, and what memory and surroundings raise."""
        self.surroundings = surroundings
        try:
            with np.errstate(all="ignore"):
                self._run()
        except BadAddress as error:
            raise BadAddress(f"{self._place(error)}: {error}") from error

    def _run(self) -> None:
        number, registers = 0, self.code.initial()
        while True:
            left = self.code.run(self, number, registers)
            if left is None:
                self.block.leave(self.shape.lanes)
                return
            back = Divergence(self, *left).run()
            if back is None:
                return
            number, registers = back

    def _place(self, error: BaseException) -> str:
        """The kernel, block and instruction of an access, found by the innermost call on the error's stack."""
        place, trace = "", error.__traceback__
        while trace is not None:
            seen = trace.tb_frame.f_locals
            form = getattr(seen.get("site", seen.get("self")), "form", None)
            if isinstance(form, MemoryForm):
                place = f", {place_of(form.instruction)}"
            trace = trace.tb_next
        return f"{self.code.kernel.name}, block {self.block.index}{place}"

    @cached_property
    def local_region(self) -> Any:
        """The local memory of all lanes, one after another."""
        return array_region(max(self.local_bytes, 16) * self.shape.lanes, "local memory")

    @cached_property
    def local_offsets(self) -> Array:
        return np.arange(self.shape.lanes, dtype="u8") * np.uint64(max(self.local_bytes, 16))

    def thread_index(self, axis: int) -> Array:
        """`%tid` of every lane."""
        x, y, _ = self.shape.threads
        parts = (self.threads % x, self.threads // x % y, self.threads // (x * y))
        return parts[axis].astype("u4")

    def is_whole(self, mask: Array) -> bool:
        return mask.tobytes() == self.code.operands.values.ones

    def tell(self, access: ThreadAccess) -> None:
        self.surroundings.access(access)

    def clock(self) -> int:
        return int(self.surroundings.nanotime())

    def fence(self, sem: str, scope: str, mask: Array | None, instruction: Instruction) -> None:
        self.surroundings.fence(sem, scope, self.chosen(mask), instruction)

    def warp_barrier(self, mask: Array | None, instruction: Instruction) -> None:
        self.surroundings.warp_barrier(self.chosen(mask), instruction)

    def wait_for_launches(self, mask: Array | None, instruction: Instruction) -> None:
        self.surroundings.wait_for_launches(self.chosen(mask), instruction)

    def launch_dependents(self) -> None:
        self.surroundings.launch_dependents()

    def chosen(self, mask: Array | None) -> Array:
        return self.threads if mask is None else self.threads[mask]

    def barrier_request(
        self, kind: str, number: int, count: int | None, mask: Array | None, instruction: Instruction
    ) -> BarrierRequest:
        """The request of threads that arrive at a barrier. If they return because the barrier has opened, their earlier
        request."""
        if self.opened is not None:
            return self.opened
        threads = self.chosen(mask)
        lanes = len(threads)
        if count is not None and self.block.threads - 1 in threads:
            lanes += -self.block.threads % WARP  # the count is a multiple of a warp
        request = BarrierRequest(self.block, kind, number, count, threads, lanes, self.block.barrier(number))
        self.instruction = instruction
        return request

    def pass_barrier(self, request: BarrierRequest) -> Any:
        """Arrive at a barrier and wait. Diverged lanes only arrive; they call this again when the barrier has
        opened."""
        instruction = self.instruction
        if self.opened is None:
            self.surroundings.arrive(request.number, request.threads, instruction)
            request.arrive()
            if self.deferred:
                self.request = request
                return request.result(self.shape.lanes)
            if request.kind != "arrive" and not request.is_open():
                self.surroundings.wait(request.is_open, instruction)
        if request.kind != "arrive":
            self.surroundings.barrier(request.number, request.threads, instruction)
        return request.result(self.shape.lanes) if request.kind == "red" else None

    def out_of_steps(self, index: int) -> None:
        kernel, flow = self.code.kernel, self.code.flow
        loop = flow.loop_at(index)
        lines = flow.lines(loop) if loop is not None else []
        text = ", ".join(f"{line.file}:{line.line}" for line in lines) or f"PTX line {kernel.instructions[index].line}"
        error = StepLimit(
            f"{kernel.name}: block {self.block.index}, threads {self.threads[0]} to {self.threads[-1]}, went through "
            f"loops {self.program.steps} times; the last one: {text}"
        )
        error.where = f"{lines[0].file}:{lines[0].line}" if lines else None
        raise error

    def trap(self, index: int) -> None:
        instruction = self.code.kernel.instructions[index]
        raise KernelTrap(
            f"{self.code.kernel.name}: {place_of(instruction)} was executed by block {self.block.index}, threads "
            f"{self.threads[0]} to {self.threads[-1]}"
        )
