"""The share of tricomm itself in the time of a simulated call: python -m devtools.simulated_overhead

The calls run in Triton's interpreter on a CPU, and say nothing about a GPU. They show how much wall time tricomm adds
to the interpreter's time for loads, stores and arithmetic. The shares are from a profile, which exaggerates the cost of
Python calls. The wall time is from calls without a profile.

    waiting      asleep in a poll while other ranks run
    interpreter  Triton's interpreter and the numpy calls that it makes: loads, stores, arithmetic
    lines        the kernels' own lines, in Python
    adapter      kernels/launch: patches and corrections of the interpreter, launches
    host         the rest of tricomm: arguments, plan, announcement, monitor
"""

from __future__ import annotations

import cProfile
import json
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

import tricomm
from tricomm import kernels, store
from tricomm.kernels.collectives import registry
from tricomm.perf import text_table
from tricomm.perf.workers import run_workers

PARTS = ("waiting", "interpreter", "lines", "adapter", "host")
_KERNELS = Path(kernels.__file__).resolve().parent
_HOST = tuple(Path(module.__file__ or "").resolve().parent for module in (tricomm, store))
# Small mailboxes, because the first epoch clears one, which takes an interpreted kernel seconds if it is large.
_OPTIONS = tricomm.Options(arena_bytes=1 << 20)
COLLECTIVES = ("all_reduce", "all_gather")  # the others are made of the same pieces


def measure(world_size: int = 4, nbytes: int = 65536, calls: int = 5, timeout: float = 120.0) -> list[dict[str, Any]]:
    """One record per kernel: mean over ranks of the wall time of a call (us) and of each part's share (0 to 1)."""
    settings = {"nbytes": nbytes, "calls": calls}
    by_kernel: dict[str, list[dict[str, Any]]] = {}
    for _, message in run_workers("devtools.simulated_overhead:rank_main", world_size, settings, timeout):
        by_kernel.setdefault(message["kernel"], []).append(message)
    rows = []
    for kernel, records in by_kernel.items():
        mean = {name: sum(r[name] for r in records) / len(records) for name in ("wall_us", *PARTS)}
        busy = 1.0 - mean["waiting"]
        ours = mean["adapter"] + mean["host"]
        row = {"kernel": kernel, "ranks": world_size, "nbytes": nbytes, "simulated": True, **mean}
        rows.append({**row, "ours": ours, "ours_of_busy": ours / busy})
    return rows


def rank_main(emit: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Run one rank: emits a message per kernel."""
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
            emit("overhead", kernel=kernel.name, wall_us=wall * 1e6, **shares(profile))
        comm.barrier()


def shares(profile: cProfile.Profile) -> dict[str, float]:
    """Each part's share of the profiled time, 0 to 1. A built-in function counts for its callers."""
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
    """The part of a call that a source file belongs to; the interpreter's includes libraries that only it calls."""
    path = Path(file).resolve()
    if path.is_relative_to(_KERNELS):
        return "adapter" if path.parent.name == "launch" else "lines"
    return "host" if "torch" in path.parts or any(map(path.is_relative_to, _HOST)) else "interpreter"


@click.command()
@click.option("--nproc", type=click.IntRange(1, 8), default=4, show_default=True, help="Ranks.")
@click.option("--nbytes", type=click.IntRange(4), default=65536, show_default=True, help="Input bytes per rank, fp32.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(nproc: int, nbytes: int, as_json: bool) -> None:
    """Print the wall time of a simulated call by part."""
    rows = measure(nproc, nbytes)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    click.echo(f"# {nproc} ranks, {nbytes} bytes of float32 each (simulated: Triton's interpreter on a CPU)")
    header = ("kernel", "wall us", *PARTS, "ours", "ours of busy")
    shares_of = (*PARTS, "ours", "ours_of_busy")
    cells = [(row["kernel"], f"{row['wall_us']:.0f}", *(f"{row[name]:.1%}" for name in shares_of)) for row in rows]
    click.echo("\n".join(text_table.lines(header, cells, right=header[1:])))


if __name__ == "__main__":
    main()
