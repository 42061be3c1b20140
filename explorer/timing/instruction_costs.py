"""The cost of a PTX instruction for a warp: issue slots of its scheduler, and cycles until its result can be used.

A GPU does not run PTX: ptxas removes moves and widening conversions, and splits 64-bit integers into pairs. The table
is based on the machine code for Volta and later (`tricomm kernels --sass` shows it).
"""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.explorer.ptx.analysis.control_flow import Flow
from tricomm.explorer.ptx.analysis.liveness import read, written
from tricomm.explorer.ptx.instructions import Instruction, PtxKernel
from tricomm.perf.cost_model.machines import Latencies

_ORDERED = frozenset("st atom red bar barrier fence membar bra ret exit cp nanosleep".split())
_FREE = ("mov", "cvta", "ld.param", "griddepcontrol", "pmevent")
# By opcode: (slots, latency in units of the latency of a 32-bit addition).
_SLOW = {
    **dict.fromkeys(("div", "rem"), (8, 8.0)),
    "sqrt": (4, 6.0),
    **dict.fromkeys(("rcp", "ex2", "lg2"), (2, 5.0)),
    **dict.fromkeys(("popc", "clz", "vote", "activemask"), (1, 3.0)),
    **dict.fromkeys(("shfl", "redux"), (1, 6.0)),
    **dict.fromkeys(("cvt", "setp"), (1, 1.5)),
    "bra": (2, 2.0),
}


@dataclass(frozen=True, slots=True)
class InstructionCost:
    """The cost of an instruction: issue `slots`, and `latency`, the microseconds until its result can be used.
    Registers are given by numbers.

    `ordered`: no later instruction is issued before it. `shared`: it accesses shared memory.
    """

    slots: float
    latency: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    ordered: bool
    shared: bool = False


def cost(instruction: Instruction, times: Latencies) -> tuple[int, float]:
    """(slots, cycles) of an instruction. For a global access, without the latency of memory, which depends on the
    address."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode in _FREE or (opcode == "ld" and "param" in modifiers):
        return 0, 0.0
    if (
        opcode == "cvt"
        and all(m[:1] in "us" for m in modifiers[-2:])
        and {m[1:] for m in modifiers[-2:]} == {"32", "64"}
    ):
        return 0, 0.0
    wide = 2 if any(m[1:] == "64" for m in modifiers[-1:]) and opcode not in ("ld", "st", "atom", "red") else 1
    if opcode in ("ld", "atom") and any(m.startswith("shared") for m in modifiers):
        return 1, times.shared
    if modifiers[-1:] == ("f64",):
        return 2, 2 * times.arithmetic
    slots, factor = _SLOW.get(opcode, (1, 1.0))
    if wide == 2 and opcode in ("mul", "mad"):
        slots, factor = 4, 3.0
    elif wide == 2:
        slots, factor = 2 * slots, factor * 1.5
    return slots, factor * times.arithmetic


class KernelCosts:
    """The costs of a kernel's instructions, the `index` of each, the `starts` of basic blocks, and which blocks poll.

    The sum of the slots is scaled to `machine_instructions`, the number in the machine code. None: it is not scaled.
    """

    def __init__(self, kernel: PtxKernel, times: Latencies, machine_instructions: int | None = None) -> None:
        self.flow = Flow(kernel)
        numbers = {name: n for n, name in enumerate([*kernel.registers, "%cc.cf"])}
        self.registers = len(numbers)
        self.costs: list[InstructionCost] = []
        counted = [cost(i, times) for i in kernel.instructions]
        scale = 1.0 if machine_instructions is None else machine_instructions / sum(slots for slots, _ in counted)
        for i, (slots, cycles) in zip(kernel.instructions, counted, strict=True):
            reads = tuple(dict.fromkeys(numbers[n] for n in read(i)))
            writes = tuple(numbers[n] for n in written(i))
            shared = any(m.startswith("shared") for m in i.modifiers)
            ordered = i.opcode in _ORDERED or i.modifiers[:1] == ("st",)
            self.costs.append(InstructionCost(scale * slots, times.us(cycles), reads, writes, ordered, shared))
        self.index = {id(i): n for n, i in enumerate(kernel.instructions)}
        self.starts = [block.start for block in self.flow.blocks]
        self.ends = [block.end for block in self.flow.blocks]
        # For each block the innermost loop that polls: it has a strong load, and no loop within it has one.
        self.polling: list[int | None] = [None] * len(self.starts)
        for number, loop in enumerate(self.flow.loops):  # inner loops first
            inside = [
                n for n in loop.blocks if any(_is_poll(i) for i in kernel.instructions[self.starts[n] : self.ends[n]])
            ]
            if inside and all(self.polling[n] is None for n in loop.blocks):
                for n in loop.blocks:
                    self.polling[n] = number


def _is_poll(instruction: Instruction) -> bool:
    return instruction.opcode == "ld" and any(m in ("volatile", "relaxed", "acquire") for m in instruction.modifiers)
