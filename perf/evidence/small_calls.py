"""A few small calls of every kernel, streams of one process, for a tool that watches them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from tricomm import Options
from tricomm.kernels import registry
from tricomm.perf.evidence import checks, machine
from tricomm.perf.evidence.stage import Settings


def main() -> int:
    """Exit code 1 where a result is wrong."""
    on = machine.of(Settings(Path()))
    bad: list[str] = []
    for kernel in registry.KERNELS:
        wanted = checks.calls(kernel, 2, True)
        options = Options(timeout=300.0, stall_timeout=300.0, arena_bytes=1 << 20)
        found = on.together(2, partial(checks.wrong, kernel=kernel, dtype=torch.bfloat16, wanted=wanted), options)
        bad += [f"{kernel.name}: {text}" for rank in found for text in rank]
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
