"""An instruction that is a call of a Python function: memory, exchanges, barriers and the like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tricomm.explorer.ptx.instructions import Address, Operand
from tricomm.explorer.ptx.unit_view import UnitShape


@dataclass(frozen=True, slots=True)
class Operation:
    """`call(unit, mask, [address,] *arguments)`; `mask` None: all lanes.

    results     destinations, None for `_`; with more than one, `call` gives a tuple
    kinds       of the results: the numpy type of an array, "?" for a predicate, "number" for one number for all lanes
    address     passed first: a number if it is known to step from lane to lane, else an array
    arguments   (operand, numpy type), passed as arrays; "?" as an array of bools; "number": a number, for what is
                uniform
    waits       lanes of a warp meet here: it needs all lanes that `members` (an operand, a mask by lane) names, or all
    strong      it reads memory in a way that may wait for another unit
    """

    call: Callable[..., Any]
    results: tuple[Operand | None, ...] = ()
    kinds: tuple[str, ...] = ()
    address: Address | None = None
    arguments: tuple[tuple[Operand, str], ...] = ()
    waits: bool = False
    members: Operand | None = None
    strong: bool = False


class KnownOperands(Protocol):
    """The operands of a kernel in units of one shape, as `generated.operand_code` knows them before it runs."""

    @property
    def unit(self) -> UnitShape: ...

    def shape(self, operand: Operand | None, width: int) -> Any:
        """A `LaneShape`; `width` counts for a literal."""

    def address(self, address: Address) -> tuple[str, int | None]:
        """The code of an address with its offset, and its stride."""
