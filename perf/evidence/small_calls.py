"""A few small calls of every kernel, streams of one process, for a tool that watches them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from tricomm import Options
from tricomm.kernels import registry
from tricomm.kernels.registry import Kernel
from tricomm.perf.evidence import checks, machine
from tricomm.perf.evidence.stage import Settings

_DTYPE = "bfloat16"
_OPTIONS = Options(timeout=300.0, stall_timeout=300.0, arena_bytes=1 << 20)


def main() -> int:
    """Exit code 1 where a result is wrong."""
    on = machine.of(Settings(Path()))
    bad: list[str] = []
    for kernel, world_size in pairs():
        wanted = checks.calls(kernel, world_size, _DTYPE, True)
        make = partial(checks.wrong, kernel=kernel, dtype=getattr(torch, _DTYPE), wanted=wanted)
        bad += [f"{kernel.name}: {text}" for rank in on.together(world_size, make, _OPTIONS) for text in rank]
    print("\n".join(bad))
    return 1 if bad else 0


def pairs() -> list[tuple[Kernel, int]]:
    """Every kernel, with the fewest ranks that it can be run with."""
    return [(k, registry.CUBE_RANKS if k.needs_cube else 2) for k in registry.KERNELS]


if __name__ == "__main__":
    sys.exit(main())
