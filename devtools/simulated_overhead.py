"""How much of a simulated call is ours: python -m devtools.simulated_overhead

Simulated: all of this is Triton's interpreter on a CPU, and says nothing about a GPU. It says how much of the wall time
of a call on the CPU tricomm adds to what the interpreter itself needs for its loads, stores and arithmetic. The share
is from a profile, which makes Python calls look dearer than they are; the wall time is from calls without one.

    waiting      asleep in a poll, while other ranks run
    interpreter  Triton's interpreter and the numpy calls that it makes: loads, stores, arithmetic
    lines        the kernels' own lines, in Python
    adapter      kernels/launch/triton_adapter.py, interpreter.py: patching, mending, launching
    host         the rest of tricomm: arguments, plan, announcement, monitor
"""

from __future__ import annotations

import json
from typing import Any

import click

from tricomm.perf.workers import talk

PARTS = ("waiting", "interpreter", "lines", "adapter", "host")


def measure(world_size: int = 4, nbytes: int = 65536, calls: int = 5, timeout: float = 120.0) -> list[dict[str, Any]]:
    """One record per kernel: mean over ranks of the wall time of a call (us) and of each part's share (0 to 1)."""
    settings = {"nbytes": nbytes, "calls": calls}
    found: dict[str, list[dict[str, Any]]] = {}
    for _, record in talk("devtools.simulated_overhead_rank", world_size, settings, timeout):
        found.setdefault(record["kernel"], []).append(record)
    rows = []
    for kernel, records in found.items():
        mean = {name: sum(r[name] for r in records) / len(records) for name in ("wall_us", *PARTS)}
        busy = 1.0 - mean["waiting"]
        ours = mean["adapter"] + mean["host"]
        row = {"kernel": kernel, "ranks": world_size, "nbytes": nbytes, "simulated": True, **mean}
        rows.append({**row, "ours": ours, "ours_of_busy": ours / busy})
    return rows


@click.command()
@click.option("--nproc", type=click.IntRange(1, 8), default=4, show_default=True, help="Ranks.")
@click.option("--nbytes", type=click.IntRange(4), default=65536, show_default=True, help="Input bytes per rank, fp32.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(nproc: int, nbytes: int, as_json: bool) -> None:
    """Print where the wall time of a simulated call goes."""
    rows = measure(nproc, nbytes)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    click.echo(f"# {nproc} ranks, {nbytes} bytes of float32 each (simulated: Triton's interpreter on a CPU)")
    click.echo(f"{'kernel':<28}{'wall us':>10}" + "".join(f"{name:>13}" for name in (*PARTS, "ours", "ours of busy")))
    for row in rows:
        shares = [row[name] for name in (*PARTS, "ours", "ours_of_busy")]
        click.echo(f"{row['kernel']:<28}{row['wall_us']:>10.0f}" + "".join(f"{share:>13.1%}" for share in shares))


if __name__ == "__main__":
    main()
