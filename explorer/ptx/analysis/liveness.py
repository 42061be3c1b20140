"""The registers that an instruction reads and writes, and those that a thread needs later."""

from __future__ import annotations

from functools import cache

from tricomm.explorer.ptx.analysis.control_flow import Flow
from tricomm.explorer.ptx.arithmetic import CARRY
from tricomm.explorer.ptx.instructions import Instruction, PtxKernel, registers_of

# Opcodes (with modifiers where these decide) whose first operand is not a destination.
_WRITES_NOTHING = (
    "st", "red", "bra", "ret", "exit", "trap", "brkpt", "membar", "fence", "prefetch", "prefetchu", "cp", "nanosleep",
    "griddepcontrol", "discard", "applypriority", "stmatrix", "pmevent", "multimem.st", "multimem.red", "bar.sync",
    "bar.arrive", "bar.warp", "bar.cta.sync", "bar.cta.arrive", "barrier.sync", "barrier.arrive", "barrier.cta.sync",
    "barrier.cta.arrive",
)  # fmt: skip


@cache
def _writes_nothing(name: str) -> bool:
    return any(f"{name}.".startswith(f"{each}.") for each in _WRITES_NOTHING)


def destinations(instruction: Instruction) -> int:
    """How many of the first operands are written: 0 or 1; a `Pair` or `Vector` counts once."""
    return 0 if not instruction.operands or _writes_nothing(instruction.name) else 1


def written(instruction: Instruction) -> tuple[str, ...]:
    """Names of the registers that an instruction writes if its guard is true. The carry flag is `CARRY`."""
    first = instruction.operands[: destinations(instruction)]
    names = tuple(register.name for operand in first for register in registers_of(operand))
    return (*names, CARRY.name) if "cc" in instruction.modifiers else names


def read(instruction: Instruction) -> tuple[str, ...]:
    """Names of the registers that an instruction reads, including its guard. A name may occur more than once."""
    sources = instruction.operands[destinations(instruction) :]
    rest = [register.name for operand in sources for register in registers_of(operand)]
    if instruction.opcode in ("addc", "subc", "madc"):
        rest.append(CARRY.name)
    return (*rest, instruction.guard[0].name) if instruction.guard else tuple(rest)


class Liveness:
    """For each instruction, the registers whose values a thread may still read. Sets are stored as bits of integers."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._names = [*flow.kernel.registers, CARRY.name]
        bits = {name: 1 << n for n, name in enumerate(self._names)}
        self._written = [_bits(written(i), bits) if i.guard is None else 0 for i in flow.kernel.instructions]
        self._read = [_bits(read(i), bits) for i in flow.kernel.instructions]
        self._before = [0] * (len(flow.kernel.instructions) + 1)
        pending = set(range(flow.exit))
        while pending:
            number = max(pending)
            pending.discard(number)
            start = flow.blocks[number].start
            old = self._before[start]
            self._walk(number)
            if self._before[start] != old:
                pending.update(flow.predecessors[number])

    def before(self, index: int) -> frozenset[str]:
        """Registers that are live just before instruction `index`."""
        return self._set(self._before[index])

    def _after(self, block: int) -> int:
        live = 0
        for each in self._flow.blocks[block].successors:
            live |= self._before[self._flow.blocks[each].start] if each != self._flow.exit else 0
        return live

    def _walk(self, block: int) -> None:
        live = self._after(block)
        for index in range(self._flow.blocks[block].end - 1, self._flow.blocks[block].start - 1, -1):
            live = self._before[index] = live & ~self._written[index] | self._read[index]

    def _set(self, bits: int) -> frozenset[str]:
        names = []
        while bits:
            low = bits & -bits
            names.append(self._names[low.bit_length() - 1])
            bits ^= low
        return frozenset(names)


def _bits(names: tuple[str, ...], bits: dict[str, int]) -> int:
    mask = 0
    for name in names:
        mask |= bits[name]
    return mask


def definitions(kernel: PtxKernel) -> dict[str, list[int]]:
    """For each register, the indices of the instructions that write it."""
    by_name: dict[str, list[int]] = {}
    for index, instruction in enumerate(kernel.instructions):
        for name in written(instruction):
            by_name.setdefault(name, []).append(index)
    return by_name
