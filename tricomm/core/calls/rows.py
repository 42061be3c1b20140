"""Calls whose rows are not those of one tensor: several tensors in one launch, and uneven numbers of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tricomm import arguments
from tricomm.errors import InvalidArgument

_MOST = (1 << 32) - 1  # elements: a header has 32 bits for them
_LISTS, _INTEGERS = (list, tuple), {int}


def check_list(xs: Sequence[torch.Tensor], what: str) -> None:
    """Refuse a list that cannot be packed: empty, or of several types. Raises `InvalidArgument`."""
    if not xs:
        raise InvalidArgument(f"{what}: an empty list was given")
    kinds = dict.fromkeys(str(x.dtype) for x in xs)
    if len(kinds) > 1:
        raise InvalidArgument(
            f"{what}: tensors of one dtype are needed, found {', '.join(kinds)}; make a call for each"
        )


def pack(xs: Sequence[torch.Tensor], rows: int, what: str) -> torch.Tensor:
    """All tensors in one: [rows, elements of a row of each tensor in turn], flattened. Raises as `allocated` does."""
    parts = [arguments.allocated(what, x.reshape, rows, -1) for x in xs]
    return arguments.allocated(what, torch.cat, parts, dim=1).reshape(-1)


def unpack(packed: torch.Tensor, into: Sequence[torch.Tensor], rows: int) -> None:
    """Copy every tensor's part of `packed` into it."""
    parts = packed.reshape(rows, -1).split([y.numel() // rows for y in into], dim=1)
    for y, part in zip(into, parts, strict=True):
        y.copy_(part.reshape(y.shape))


def check_splits(splits: Any, world_size: int, what: str) -> tuple[int, ...]:
    """`splits` as a tuple; raises `InvalidArgument` unless it is one whole number, 0 or more, for each rank."""
    numbers = tuple(splits) if isinstance(splits, Sequence) and not isinstance(splits, str) else ()
    if len(numbers) != world_size or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise InvalidArgument(f"{what}={splits!r}: {world_size} numbers of rows are needed, one for each rank")
    return numbers


def total(sends: Any, takes: Any, rank: int, world_size: int, length: int, row: int) -> int:
    """The number of rows that come, if the splits fit an input of `length` rows of `row` numbers. A quick form of
    `check_splits` and `check_uneven`; raises a bare `LookupError`."""
    if not (
        type(sends) in _LISTS
        and type(takes) in _LISTS
        and len(sends) == len(takes) == world_size
        and {*map(type, sends), *map(type, takes)} == _INTEGERS
        and min(sends) >= 0 <= min(takes)
        and sum(sends) == length
        and sends[rank] == takes[rank]
        and row * max(sends) <= _MOST
    ):
        raise LookupError
    return sum(takes)


def check_uneven(x: torch.Tensor, in_splits: tuple[int, ...], out_splits: tuple[int, ...], rank: int) -> None:
    """Refuse splits that do not fit `x`, or each other on this rank. Raises `InvalidArgument`."""
    if not x.dim() or x.shape[0] != sum(in_splits):
        raise InvalidArgument(
            f"all_to_all_v: in_splits {list(in_splits)} add up to {sum(in_splits)}, the input of shape "
            f"{tuple(x.shape)} has {x.shape[0] if x.dim() else 'no'} rows"
        )
    if in_splits[rank] != out_splits[rank]:
        raise InvalidArgument(
            f"all_to_all_v: rank {rank} sends itself {in_splits[rank]} rows (in_splits) and expects "
            f"{out_splits[rank]} (out_splits)"
        )
    row = math.prod(x.shape[1:]) * (2 if x.is_complex() else 1)
    if row * max(in_splits) > _MOST:
        raise InvalidArgument(
            f"all_to_all_v: {row * max(in_splits)} elements for one rank; at most {_MOST} are possible"
        )
