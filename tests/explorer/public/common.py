"""Inputs, references, launches and expected findings of the kernels of this package."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tricomm import Communicator

INT = torch.int32


@dataclass(frozen=True)
class Mistake:
    """A value of BUG, and the findings that it must have.

    kinds   kinds of finding, any of them, separated by blanks
    pairs   the marks of two lines that a race or a scope may be between, any of them
    lone    the marks of lines that any other finding may name
    """

    name: str
    world_size: int
    kinds: str
    pairs: tuple[str, ...] = ()
    lone: tuple[str, ...] = ()


def races(pair: str, names: str, world_size: int = 2) -> tuple[Mistake, ...]:
    """Mistakes of those names, separated by semicolons, each of which is a race between the lines of `pair`."""
    return tuple(Mistake(name, world_size, "race", pairs=(pair,)) for name in names.split("; "))


def marks(file: Path) -> dict[str, str]:
    """file:line of each line of `file` that ends in `# @ mark`, and the mark."""
    lines = enumerate(file.read_text().splitlines(), 1)
    return {f"{file}:{number}": text.split("  # @ ")[1].strip() for number, text in lines if "  # @ " in text}


def numbers(rank: int, call: int, count: int) -> torch.Tensor:
    """An input that differs in every element, call and rank."""
    return (torch.arange(count, dtype=INT) * 7 + 1) * (rank + 1) + 1000 * call


def run(comm: Communicator, kernel: Any, blocks: int, *args: Any, bug: str, **more: int) -> None:
    """Launch a kernel of this package."""
    comm.launch(kernel, blocks, *args, WORLD=comm.world_size, BLOCK=4, BUG=bug, **more)


Launch = Callable[[torch.Tensor, torch.Tensor, int], None]


def gathers(comm: Communicator, calls: int, n: int, launch: Launch) -> list[torch.Tensor]:
    """The outputs of `launch(input, output, call)`, each of which must be the concatenation of all ranks' inputs."""
    world = range(comm.world_size)
    outs = _outputs(comm, calls, n, n * comm.world_size, launch)
    return right(outs, [torch.cat([numbers(rank, call, n) for rank in world]) for call in range(calls)])


def _outputs(comm: Communicator, calls: int, n: int, count: int, launch: Launch) -> list[torch.Tensor]:
    outs = [torch.zeros(count, dtype=INT) for _ in range(calls)]
    for call, out in enumerate(outs):
        launch(numbers(comm.rank, call, n), out, call)
    return outs


def right(outs: list[torch.Tensor], expected: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compare after all calls: a rank that stops earlier would leave its peers in their kernels."""
    assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True)), (outs, expected)
    return outs
