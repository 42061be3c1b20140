"""Rank functions of the engine tests."""

import torch


def value(rank, shape, dtype, seed):
    """Small integers that differ by rank and call; their sums are exact in every type."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return ((numbers * (2 * rank + 3) + seed * 5 + rank) % 11).reshape(shape).to(dtype)
