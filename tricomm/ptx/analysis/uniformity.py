"""Which registers hold one value in all threads of a warp, or of a block, so that a scalar can stand for them.

A register is uniform if each of its definitions computes from uniform values only, and if all threads that read it have
got it from the same execution of the definition. The second holds if no definition lies between a branch that threads
leave in different ways and the point at which they meet again. In such a region a register may still be uniform: if it
has one definition, without a guard, that dominates all of its uses. Then a thread that has not executed it never
reads the register, and what the definition computes from stays as it is until the threads have met again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.ptx.analysis.control_flow import ENDS, Flow, reachable
from tricomm.ptx.analysis.liveness import definitions, destinations, uses
from tricomm.ptx.instructions import Instruction, Integer, Operand, Register, Special, Vector, registers_of

_PURE = frozenset(
    """
    abs add and bfe bfi bfind bmsk brev clz cnot copysign cos cvt cvta div dp2a dp4a ex2 fma fns lg2 lop3 mad mad24 max
    min mov mul mul24 neg not or popc prmt rcp rem rsqrt sad selp set setp shf shl shr sin slct sqrt sub szext tanh
    testp xor isspacep
    """.split()
)
_OF_A_BLOCK = (
    "%ctaid", "%nctaid", "%ntid", "%nwarpid", "%nsmid", "%gridid", "%clusterid", "%nclusterid", "%cluster_ctaid",
    "%cluster_nctaid", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster", "%total_smem_size",
    "%aggr_smem_size", "%dynamic_smem_size", "%current_graph_exec",
)  # fmt: skip
_ALL_LANES = (-1, 0xFFFFFFFF)


@dataclass(frozen=True)
class Uniform:
    """`registers` hold one value in all threads of the unit; `branches` (indices) send all threads the same way."""

    registers: frozenset[str]
    branches: frozenset[int]


def uniformity(flow: Flow, unit: str = "block", loads: bool = False) -> Uniform:
    """For a "warp" or a "block" as the unit.

    `loads`: one instruction that loads from one address gives all threads of the unit that execute it together the same
    value. That is so if the unit is executed as one.
    """
    return _Analysis(flow, unit, loads).result()


class _Analysis:
    def __init__(self, flow: Flow, unit: str, loads: bool) -> None:
        self._flow = flow
        self._code = flow.kernel.instructions
        self._warp, self._loads = unit == "warp", loads
        self._definitions = definitions(flow.kernel)
        self._uses = uses(flow.kernel)
        self._varying: set[str] = set()
        self._dividing: set[int] = set()  # blocks that threads leave in different ways
        self._apart: set[int] = set()  # blocks that the threads may come to apart from each other
        self._once = {name for name in self._definitions if self._defined_once(name)}
        threads = flow.kernel.threads
        # Warps consist of threads with successive numbers: only then are bits of %tid.x above the fifth the warp's own.
        self._rows = threads is not None and (threads[0] % 32 == 0 or threads[1] == threads[2] == 1)

    def result(self) -> Uniform:
        changed = True
        while changed:
            changed = self._branches() | self._registers()
        names = self._flow.kernel.registers
        steady = frozenset(
            index
            for index, instruction in enumerate(self._code)
            if instruction.opcode in ("bra", "ret", "exit") and not self._divides(instruction)
        )
        return Uniform(frozenset(name for name in names if name not in self._varying), steady)

    def _defined_once(self, name: str) -> bool:
        places = self._definitions[name]
        if len(places) != 1 or self._code[places[0]].guard is not None:
            return False
        block = self._flow.block_of(places[0])
        others = ((index, self._flow.block_of(index)) for index in self._uses.get(name, ()))
        return all(
            index > places[0] if other == block else self._flow.dominates(block, other) for index, other in others
        )

    def _divides(self, instruction: Instruction) -> bool:
        return instruction.guard is not None and instruction.guard[0].name in self._varying

    def _branches(self) -> bool:
        """Find the blocks that lie between a branch that divides threads and the point where they meet."""
        before = len(self._dividing)
        for number, block in enumerate(self._flow.blocks):
            if number in self._dividing or not self._divides(self._code[block.end - 1]):
                continue
            if len(self._going_on(number)) > 1:
                meeting = self._flow.reconvergence[number]
                region = reachable(self._flow.edges, self._flow.edges[number], without=meeting)
                self._dividing.add(number)
                self._apart |= region
        return len(self._dividing) != before

    def _going_on(self, number: int) -> list[int]:
        """The successors of a block in which threads do not end at once."""
        return [each for each in self._flow.edges[number] if each != self._flow.exit and not self._only_ends(each)]

    def _only_ends(self, number: int) -> bool:
        block = self._flow.blocks[number]
        return self._code[block.start].opcode in ENDS and self._code[block.start].guard is None

    def _registers(self) -> bool:
        before = len(self._varying)
        changed = True
        while changed:
            size = len(self._varying)
            for name, places in self._definitions.items():
                if name not in self._varying and not all(self._steady(name, place) for place in places):
                    self._varying.add(name)
            changed = len(self._varying) != size
        return len(self._varying) != before

    def _steady(self, name: str, index: int) -> bool:
        """The definition of `name` at `index` gives all threads that may read it the same value."""
        instruction, block = self._code[index], self._flow.block_of(index)
        if self._divides(instruction):
            return False
        if block in self._apart and name not in self._once:
            return False
        sources = instruction.operands[destinations(instruction) :]
        if self._of_the_warp(instruction, sources, block):
            return True
        if not all(self._same(each) for each in sources):
            return False
        if instruction.opcode == "ld":
            if "param" in instruction.modifiers or "const" in instruction.modifiers:
                return True
            return self._loads and block not in self._apart
        return instruction.opcode in _PURE

    def _same(self, operand: Operand | None) -> bool:
        match operand:
            case Special(name):
                return name.split(".")[0] in _OF_A_BLOCK or (self._warp and name == "%warpid")
            case Vector(elements):
                return all(self._same(each) for each in elements)
            case _:
                return not any(register.name in self._varying for register in registers_of(operand))

    def _of_the_warp(self, instruction: Instruction, sources: tuple[Operand, ...], block: int) -> bool:
        """What is the same in all lanes of a warp although its sources are not."""
        if not self._warp or block in self._apart:
            return False
        everyone = bool(sources) and self._constant(sources[-1]) in _ALL_LANES
        if instruction.opcode in ("vote", "redux"):
            return everyone
        if instruction.opcode == "shfl" and "idx" in instruction.modifiers:
            # Segments of fewer than 32 lanes would have a source lane each.
            return everyone and self._constant(sources[2]) == 31 and self._same(sources[1])
        return self._number_of_warp(instruction, sources)

    def _number_of_warp(self, instruction: Instruction, sources: tuple[Operand, ...]) -> bool:
        by = self._constant(sources[1]) if self._rows and len(sources) == 2 else None
        if by is None or self._origin(sources[0]) != Special("%tid.x"):
            return False
        return by & 31 == 0 if instruction.opcode == "and" else instruction.opcode == "shr" and 5 <= by < 32

    def _constant(self, operand: Operand | None) -> int | None:
        origin = self._origin(operand)
        return origin.value if isinstance(origin, Integer) else None

    def _origin(self, operand: Operand | None) -> Operand | None:
        """What a register that is only moved to once is a copy of."""
        while isinstance(operand, Register):
            places = self._definitions.get(operand.name, ())
            if len(places) != 1 or self._code[places[0]].opcode != "mov" or operand.name not in self._once:
                return operand
            operand = self._code[places[0]].operands[1]
        return operand
