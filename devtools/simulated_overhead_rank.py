"""One rank of `overhead`, a process of its own (see `ranks`)."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tricomm
from devtools.simulated_overhead import PARTS
from tricomm import store
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import interpreter
from tricomm.perf.workers import speak

_KERNELS = Path(interpreter.__file__).resolve().parent
_HOST = tuple(Path(module.__file__ or "").resolve().parent for module in (tricomm, store))
_ADAPTER = (
    "memory_access.py",
    "triton_adapter.py",
    "interpreter.py",
    "interrupts.py",
    "kernel_launch.py",
    "numpy_rounding.py",
)

# Small mailboxes: the first epoch clears one, and an interpreted kernel takes seconds for a large one.
COLLECTIVES = ("all_reduce", "all_gather")  # of the others pieces are the same
_OPTIONS = tricomm.Options(arena_bytes=1 << 20)


def main(say: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Say a record per kernel."""
    torch.set_num_threads(1)
    with tricomm.init(url, rank=rank, world_size=world_size, device="cpu", timeout=60.0, options=_OPTIONS) as comm:
        for kernel in (k for name in COLLECTIVES for k in registry.of(name, 2)):
            x = torch.ones(data["nbytes"] // 4)
            y = torch.empty(x.numel() * (world_size if kernel.collective == "all_gather" else 1))
            names = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
            collective = getattr(comm, kernel.collective)

            def calls(collective: Any = collective, x: Any = x, y: Any = y, names: Any = names) -> None:
                for _ in range(data["calls"]):
                    collective(x, out=y, **names)

            calls()
            comm.barrier()
            start = time.perf_counter()
            calls()
            wall = (time.perf_counter() - start) / data["calls"]
            comm.barrier()
            profile = cProfile.Profile()
            profile.runcall(calls)
            say("overhead", kernel=kernel.name, wall_us=wall * 1e6, **shares(profile))
        comm.barrier()


def shares(profile: cProfile.Profile) -> dict[str, float]:
    """Each part's share of the profiled time, 0 to 1; a built-in function counts for whoever called it."""
    seconds = dict.fromkeys(PARTS, 0.0)
    stats: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, _, own, _, callers) in stats.items():
        if "time.sleep" in name:
            seconds["waiting"] += own
        elif file == "~" and callers:
            for (caller, _, _), numbers in callers.items():
                seconds[part(caller)] += numbers[2]
        else:
            seconds[part(file)] += own
    total = sum(seconds.values()) or 1.0
    return {name: value / total for name, value in seconds.items()}


def part(file: str) -> str:
    """Which part of a call a source file is. Libraries that only the interpreter calls (numpy) are the interpreter."""
    path = Path(file).resolve()
    if path.parent == _KERNELS:
        return "adapter" if path.name in _ADAPTER else "lines"
    return "host" if path.parent in _HOST or "torch" in path.parts else "interpreter"


if __name__ == "__main__":
    sys.exit(speak(main))
