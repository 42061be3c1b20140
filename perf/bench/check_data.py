"""Data for the check: integers that differ between ranks and calls, and whose result is exact in every type.

So the comparison is exact, and a stale output, another rank's part or a neighbouring element never equals the right
result. The root of a call, if its collective has one, is the call's number modulo world size.
"""

from __future__ import annotations

from typing import Any

import torch

from tricomm.kernels import reference
from tricomm.kernels.collective_specs import COLLECTIVES

_POISON = 0x5A
_SMALL = {torch.float8_e4m3fn, torch.float8_e5m2}


def root(world_size: int, call: int) -> int:
    """The root of call number `call`."""
    return call % world_size


def values(
    collective: str, op: str, world_size: int, rank: int, call: int, count: int, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """The input of `rank` in call number `call`, int64 [elements of the input], for `count` elements a row.

    Sums, averages and products of up to 8 ranks are exact in `dtype`, fp8 among them.
    """
    index = torch.arange(count * COLLECTIVES[collective].rows_in(world_size), dtype=torch.int64)
    mixed = (index * 2654435761 + rank * 40503001 + call * 7919003) & 0x7FFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 1274126177) & 0x7FFFFFFFFFFF
    mixed = mixed ^ (mixed >> 17)
    if dtype == torch.bool:
        return mixed % 2
    spread = _spread(mixed, op if COLLECTIVES[collective].reduces else "none", world_size, dtype in _SMALL)
    return spread.abs() if dtype == torch.uint8 else spread


def _spread(mixed: torch.Tensor, op: str, world_size: int, few: bool) -> torch.Tensor:
    if op == "avg":
        return (mixed % (3 if few else 7) - (1 if few else 3)) * world_size  # the mean is a whole number
    if op == "prod":
        return torch.tensor([-2, -1, 1, 2])[mixed % 4]
    if op == "sum":
        return mixed % (3 if few else 31) - (1 if few else 15)
    return mixed % (15 if few else 201) - (7 if few else 100)


def expected(
    collective: str,
    op: str,
    world_size: int,
    call: int,
    count: int,
    rank: int = 0,
    dtype: torch.dtype = torch.int64,
    wire: str = "",
) -> torch.Tensor:
    """The exact result of call number `call` on `rank`, in int64 (bool for bool). With `wire` it is quantised and
    rounded as documented, in `dtype`."""
    wide = dtype if wire else torch.bool if dtype == torch.bool else torch.int64
    parts = [values(collective, op, world_size, r, call, count, dtype).to(wide) for r in range(world_size)]
    return reference.expected(collective, op, parts, rank, root(world_size, call), wire=wire)


def options(collective: str, op: str, world_size: int, call: int, count: int) -> dict[str, Any]:
    """The other arguments of the method of that name: the operation, the root, `count` rows for each rank."""
    spec = COLLECTIVES[collective]
    arguments: dict[str, Any] = {"op": op} if spec.reduces else {}
    if collective == "all_to_all_v":
        arguments = {"in_splits": [count] * world_size, "out_splits": [count] * world_size}
    return arguments | ({spec.root: root(world_size, call)} if spec.root else {})


def gets(collective: str, world_size: int, rank: int, call: int) -> bool:
    """True if the rank has a result."""
    return COLLECTIVES[collective].root != "dst" or rank == root(world_size, call)


def in_place(collective: str) -> bool:
    """True for a collective whose result replaces its input."""
    return collective in ("broadcast", "reduce")


def poison(out: torch.Tensor) -> None:
    """Fill `out` with a value that no result has: NaN, or a large number if the type has no NaN."""
    if out.dtype.is_floating_point or out.dtype.is_complex:
        out.fill_(float("nan"))
    else:
        out.view(torch.uint8).fill_(_POISON)


def wrong(result: torch.Tensor, exact: torch.Tensor) -> int:
    """Elements of `result` that are not exactly `exact`; a NaN is wrong."""
    here, there = result.cpu(), exact.to(result.dtype)
    if result.dtype in _SMALL:
        here, there = here.float(), there.float()
    if result.dtype == torch.bool:  # the poison of bool is True
        here, there = here.view(torch.uint8), there.view(torch.uint8)
    return int((here != there).sum())
