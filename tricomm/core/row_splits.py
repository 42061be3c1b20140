"""How many rows go to each rank and come from it, where that is uneven."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tricomm.errors import InvalidArgument

_MOST = (1 << 32) - 1  # elements: a header has 32 bits for them


def check(splits: Any, world_size: int, what: str) -> tuple[int, ...]:
    """`splits` as a tuple; raises `InvalidArgument` unless it is one whole number, 0 or more, for each rank."""
    found = tuple(splits) if isinstance(splits, Sequence) and not isinstance(splits, str) else ()
    if len(found) != world_size or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in found):
        raise InvalidArgument(f"{what}={splits!r}: {world_size} numbers of rows are needed, one for each rank")
    return found


def check_input(x: torch.Tensor, splits: tuple[tuple[int, ...], tuple[int, ...]], rank: int) -> None:
    """Refuse splits that are not those of `x`, or that cannot be kept by this rank alone."""
    into, out = splits
    if not x.dim() or x.shape[0] != sum(into):
        raise InvalidArgument(
            f"all_to_all_v: in_splits {list(into)} add up to {sum(into)}, the input of shape {tuple(x.shape)} has "
            f"{x.shape[0] if x.dim() else 'no'} rows"
        )
    if into[rank] != out[rank]:
        raise InvalidArgument(
            f"all_to_all_v: rank {rank} sends itself {into[rank]} rows (in_splits) and expects {out[rank]} (out_splits)"
        )
    row = math.prod(x.shape[1:]) * (2 if x.is_complex() else 1)
    if row * max(into) > _MOST:
        raise InvalidArgument(f"all_to_all_v: {row * max(into)} elements for one rank; at most {_MOST} are possible")
