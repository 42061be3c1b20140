"""The inputs of the calls of `tricomm check`."""

from __future__ import annotations

import torch


def numbers(number: int, rank: int, count: int) -> torch.Tensor:
    """`count` 64-bit integers that differ in every element, rank and call; `number` is the call's."""
    first = rank * 1000 + number * 100_000
    return torch.arange(first, first + 7 * count, 7, dtype=torch.int64)  # one operation of the stream


def cancelling(number: int, rank: int) -> float:
    """The first two ranks' numbers are large and cancel. In rank order they do so first, and a sum in fp32 is exact; in
    most other orders they absorb the others."""
    return (number + 1) * ((2.0**30, -(2.0**30))[rank] if rank < 2 else 1.0)
