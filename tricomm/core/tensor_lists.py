"""Several tensors in one launch: packed side by side, row by row, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tricomm.errors import InvalidArgument


def check(xs: Sequence[torch.Tensor], what: str) -> None:
    """Refuse a list that cannot be packed: empty, or of several types. Raises `InvalidArgument`."""
    if not xs:
        raise InvalidArgument(f"{what}: an empty list was given")
    kinds = dict.fromkeys(str(x.dtype) for x in xs)
    if len(kinds) > 1:
        raise InvalidArgument(
            f"{what}: tensors of one dtype are needed, found {', '.join(kinds)}; make a call for each"
        )


def pack(xs: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    """One tensor of all: [rows, elements of a row of each, one after another], flattened."""
    return torch.cat([x.reshape(rows, -1) for x in xs], dim=1).reshape(-1)


def unpack(packed: torch.Tensor, into: Sequence[torch.Tensor], rows: int) -> None:
    """Copy every tensor's part of `packed` into it."""
    parts = packed.reshape(rows, -1).split([y.numel() // rows for y in into], dim=1)
    for y, part in zip(into, parts, strict=True):
        y.copy_(part.reshape(y.shape))
