"""Data for the check: integers, different for every rank and call, whose result every type holds exactly.

So the comparison is exact, and a result that is right by luck (a stale output, another rank's part, a neighbour's
element) is not found right.
"""

from __future__ import annotations

import torch

_POISON = 0x5A


def values(collective: str, op: str, world_size: int, rank: int, call: int, count: int) -> torch.Tensor:
    """int64 [count]: what `rank` puts into call number `call`. Exact in bfloat16 for up to 8 ranks."""
    index = torch.arange(count, dtype=torch.int64)
    mixed = (index * 2654435761 + rank * 40503001 + call * 7919003) & 0x7FFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 1274126177) & 0x7FFFFFFFFFFF
    mixed = mixed ^ (mixed >> 17)
    if collective == "all_gather" or op in ("min", "max"):
        return mixed % 201 - 100
    if op == "avg":
        return (mixed % 7 - 3) * world_size  # the mean is a whole number
    if op == "prod":
        return torch.tensor([-2, -1, 1, 2])[mixed % 4]
    return mixed % 31 - 15


def expected(collective: str, op: str, world_size: int, call: int, count: int) -> torch.Tensor:
    """int64: the exact result of call number `call` on every rank."""
    parts = torch.stack([values(collective, op, world_size, r, call, count) for r in range(world_size)])
    if collective == "all_gather":
        return parts.reshape(-1)
    if op == "min":
        return parts.amin(0)
    if op == "max":
        return parts.amax(0)
    if op == "prod":
        return parts.prod(0)
    return parts.sum(0) // (world_size if op == "avg" else 1)


def poison(out: torch.Tensor) -> None:
    """Fill `out` with what no result is: NaN, or a large number where the type has none."""
    if out.dtype.is_floating_point:
        out.fill_(float("nan"))
    else:
        out.view(torch.uint8).fill_(_POISON)


def wrong(found: torch.Tensor, exact: torch.Tensor) -> int:
    """Elements of `found` that are not exactly `exact`; a NaN is wrong."""
    return int((found.cpu() != exact.to(found.dtype)).sum())
