"""What the kernels of this package share: inputs, references, and what a mistake has to be reported as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

INT = torch.int32


@dataclass(frozen=True)
class Mistake:
    """A value of BUG, and what the explorer must say of it.

    kinds   kinds of finding, any of them, separated by blanks
    pairs   the marks of two lines that a race or a scope may be between, any of them
    lone    the marks of lines that any other finding may name
    """

    name: str
    world_size: int
    kinds: str
    pairs: tuple[str, ...] = ()
    lone: tuple[str, ...] = ()


@triton.jit
def words(table, rank):
    """Where `rank`'s memory begins."""
    return tl.load(table + rank).to(tl.pointer_type(tl.int32))


def marks(file: Path) -> dict[str, str]:
    """file:line of each line of `file` that ends in `# @ mark`, and the mark."""
    lines = enumerate(file.read_text().splitlines(), 1)
    return {f"{file}:{number}": text.split("  # @ ")[1].strip() for number, text in lines if "  # @ " in text}


def numbers(rank: int, call: int, count: int) -> torch.Tensor:
    """An input that differs in every element, call and rank."""
    return (torch.arange(count, dtype=INT) * 7 + 1) * (rank + 1) + 1000 * call


def summed(world_size: int, call: int, count: int) -> torch.Tensor:
    return torch.stack([numbers(r, call, count) for r in range(world_size)]).sum(0).to(INT)


def right(outs: list[torch.Tensor], expected: list[torch.Tensor]) -> list[torch.Tensor]:
    """Only when all calls are over: a rank that stops in the middle would leave its peers in their kernels."""
    assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True)), (outs, expected)
    return outs
