"""How many round trips to memory lie one behind the other before a warp's first push to a peer.

A load that misses L1 is a round trip. It comes behind another one for one of two reasons:

data     its address, or the address or value of the push, needs the other's result
order    an instruction that goes in order (a store, a branch, a barrier) and stands before it needs the other's result

Shared memory is one place: what is read from it is behind all that the block has written there.
"""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.perf.cost_model.instruction_costs import InstructionCost


@dataclass
class SharedChain:
    """Of what the warps of a block have in shared memory."""

    data: int = 0
    order: int = 0


class LoadChain:
    """Of one warp's registers, by their numbers, until its first push. `floor` is that of the order alone."""

    __slots__ = ("_data", "_order", "_shared", "floor")

    def __init__(self, registers: int, shared: SharedChain) -> None:
        self._data, self._order = [0] * registers, [0] * registers
        self._shared, self.floor = shared, 0

    def passes(self, cost: InstructionCost) -> None:
        """An instruction that computes, stores, or asks for a load."""
        data, order = self.before(cost)
        if cost.shared:
            shared = self._shared
            if cost.writes:
                data, order = max(data, shared.data), max(order, shared.order)
            else:
                shared.data, shared.order = max(data, shared.data), max(order, shared.order)
        for n in cost.writes:
            self._data[n], self._order[n] = data, order
        if cost.ordered:
            self.floor = order

    def loads(self, cost: InstructionCost) -> None:
        """What the instruction, which has passed, has asked for makes a round trip."""
        for n in cost.writes:
            self._data[n] += 1
            self._order[n] += 1

    def before(self, cost: InstructionCost) -> tuple[int, int]:
        """(round trips that the operands of an instruction need, those before it in order)."""
        reads = cost.reads
        data = max((self._data[n] for n in reads), default=0)
        return data, max(self.floor, max((self._order[n] for n in reads), default=0))
