"""The instructions that become calls, and their known forms."""

from __future__ import annotations

from collections.abc import Callable

from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.ptx.operations import (
    async_copies,
    matrix_access,
    matrix_multiply,
    memory_calls,
    multicast,
    synchronisation,
    warp_exchange,
)
from tricomm.explorer.ptx.operations.operation import KnownOperands, Operation

Maker = Callable[[Instruction, KnownOperands, bool], Operation | None]

MAKERS: dict[str, Maker] = {
    "ld": memory_calls.load, "ldu": memory_calls.load, "st": memory_calls.store, "atom": memory_calls.atomic,
    "red": memory_calls.atomic, "shfl": warp_exchange.shfl, "vote": warp_exchange.vote, "redux": warp_exchange.redux,
    "activemask": warp_exchange.activemask, "bar": synchronisation.barrier, "barrier": synchronisation.barrier,
    "fence": synchronisation.fence, "membar": synchronisation.fence, "prefetch": synchronisation.nothing,
    "prefetchu": synchronisation.nothing, "discard": synchronisation.nothing, "applypriority": synchronisation.nothing,
    "griddepcontrol": synchronisation.dependency, "pmevent": synchronisation.nothing,
    "nanosleep": synchronisation.nothing, "cp": async_copies.cp, "multimem": multicast.multimem,
    "ldmatrix": matrix_access.matrix, "stmatrix": matrix_access.matrix, "mma": matrix_multiply.multiply,
    "createpolicy": synchronisation.policy, "cvta": memory_calls.cvta,
}  # fmt: skip
CONTROL = ("bra", "ret", "exit", "trap", "brkpt")


def make_operation(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation | None:
    """The call for an instruction; None if it does not become a call. `partial`: some lanes of a unit may not take
    part.

    Raises `InvalidArgument` for a form that is not known.
    """
    maker = MAKERS.get(instruction.opcode)
    return maker(instruction, operands, partial) if maker is not None else None
