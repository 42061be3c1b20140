"""An instruction that is executed by a call of a Python function: memory, exchanges, barriers and so on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tricomm.explorer.ptx.instructions import Address, Operand
from tricomm.explorer.ptx.unit_view import UnitShape


@dataclass(frozen=True, slots=True)
class Operation:
    """An instruction as `call(unit, mask, [address,] *arguments)`. A `mask` of None stands for all lanes.

    results     destinations, None for `_`; with more than one, `call` returns a tuple
    kinds       kinds of the results: numpy type of an array, "?" for a predicate, "number" for one number for all lanes
    address     passed first: a number if it has a known step from lane to lane, else an array
    arguments   (operand, numpy type), passed as arrays; type "?" as an array of bools; type "number" as one number, if
                the operand is uniform
    waits       lanes of a warp wait for each other here: for those in `members` (an operand, a mask by lane), or for
                all
    strong      it is a read that may poll for another unit's write
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
        """The `LaneShape` of an operand. `width` is the width of a literal."""

    def address(self, address: Address) -> tuple[str, int | None]:
        """The code of an address including its offset, and the stride of the address."""
