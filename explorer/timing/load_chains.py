"""The number of dependent round trips to memory before a warp's first push to a peer.

A load that misses L1 is a round trip. It depends on an earlier one for one of two reasons:

data     its address, or the address or value of the push, needs the earlier result
order    an in-order instruction before it (a store, a branch, a barrier) needs the earlier result

Shared memory counts as one location: a read depends on everything that the block has written to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.explorer.timing.instruction_costs import InstructionCost


@dataclass
class SharedChain:
    """The chain of a block's shared memory."""

    data: int = 0
    order: int = 0


class LoadChain:
    """The chains of a warp's registers, by number, until its first push. `floor` is that of program order alone."""

    __slots__ = ("_data", "_order", "_shared", "floor")

    def __init__(self, registers: int, shared: SharedChain) -> None:
        self._data, self._order = [0] * registers, [0] * registers
        self._shared, self.floor = shared, 0

    def passes(self, cost: InstructionCost) -> None:
        """Take in an instruction that computes, stores, or issues a load."""
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
        """Count a round trip for the load that the instruction, which has passed, has issued."""
        for n in cost.writes:
            self._data[n] += 1
            self._order[n] += 1

    def before(self, cost: InstructionCost) -> tuple[int, int]:
        """(round trips that the operands of an instruction depend on, those before it in order)."""
        reads = cost.reads
        data = max((self._data[n] for n in reads), default=0)
        return data, max(self.floor, max((self._order[n] for n in reads), default=0))
