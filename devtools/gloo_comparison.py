"""The c10d backend's collectives on a CPU beside ProcessGroupGloo's own: python -m devtools.gloo_comparison

Both run in the same processes in turn, and only their ratio carries over to other machines. `plain` is Gloo alone,
`checked` is Gloo with an all-gather of fixed-size records before each call, as tricomm compares calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from tricomm.perf import text_table
from tricomm.perf.workers import run_workers

_RECORD = 192  # bytes of the record that ranks compare before a call
_SIZES = (1024, 64 * 1024, 4 * 1024 * 1024)
_LIMIT = timedelta(seconds=60)
_ROUNDS = 9
_WAYS = ("ours", "plain", "checked")


def measure(world_size: int, sizes: tuple[int, ...] = _SIZES, rounds: int = _ROUNDS) -> list[dict[str, Any]]:
    """A record per collective and size (bytes of a rank's input): microseconds, and ratios; medians of the rounds."""
    settings = {"sizes": sizes, "rounds": rounds}
    messages = run_workers("devtools.gloo_comparison:rank_main", world_size, settings, 120.0)
    return [message for rank, message in messages if rank == 0]


def rank_main(emit: Callable[..., None], rank: int, world_size: int, url: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size, timeout=_LIMIT)
    store = PrefixStore("comparison", dist.distributed_c10d._get_default_store())
    gloo: Any = ProcessGroupGloo(store, rank, world_size, _LIMIT)
    record = torch.zeros(_RECORD, dtype=torch.uint8)
    records = [torch.empty_like(record) for _ in range(world_size)]
    try:
        for collective in ("all_reduce", "all_gather"):
            for nbytes in settings["sizes"]:
                x = torch.ones(nbytes // 4)
                outs = [torch.empty_like(x) for _ in range(world_size)]
                ours: dict[str, Callable[[], Any]] = {
                    "all_reduce": partial(dist.all_reduce, x),
                    "all_gather": partial(dist.all_gather, outs, x),
                }
                theirs: dict[str, Callable[[], Any]] = {
                    "all_reduce": partial(gloo.allreduce, [x]),
                    "all_gather": partial(gloo.allgather, [outs], [x]),
                }

                def plain(call: Callable[[], Any] = theirs[collective]) -> None:
                    call().wait()

                def checked(call: Callable[[], Any] = theirs[collective]) -> None:
                    gloo.allgather([records], [record]).wait()
                    call().wait()

                ways = {"ours": ours[collective], "plain": plain, "checked": checked}
                times = _timed(ways, nbytes, settings["rounds"])
                emit("row", ranks=world_size, collective=collective, nbytes=nbytes, **_compared(times))
    finally:
        dist.destroy_process_group()


def _timed(ways: dict[str, Callable[[], Any]], nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of each way, by round."""
    calls = 10 if nbytes > 1 << 20 else 50
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, call in ways.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            if turn:  # the first is a warm-up
                took[name].append((time.perf_counter() - began) / calls * 1e6)
    return took


def _compared(took: dict[str, list[float]]) -> dict[str, float]:
    record = {f"{name}_us": median(times) for name, times in took.items()}
    for name in ("plain", "checked"):
        record[f"over_{name}"] = median(a / b for a, b in zip(took["ours"], took[name], strict=True))
    return record


@click.command()
@click.option("--nproc", type=click.IntRange(2, 8), multiple=True, default=(2, 3, 4), help="Ranks; several times.")
@click.option("--rounds", type=click.IntRange(1), default=_ROUNDS, show_default=True, help="Rounds of each way.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(nproc: tuple[int, ...], rounds: int, as_json: bool) -> None:
    """Print the times of a call on the CPU, and how they compare with Gloo's."""
    rows = [row for world_size in nproc for row in measure(world_size, rounds=rounds)]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    header = ("ranks", "collective", "bytes", "ours us", "gloo us", "gloo, checked us", "over gloo", "over checked")
    cells = [
        (row["ranks"], row["collective"], row["nbytes"], *(f"{row[f'{name}_us']:.0f}" for name in _WAYS),
         *(f"{row[f'over_{name}']:.2f}" for name in _WAYS[1:]))
        for row in rows
    ]  # fmt: skip
    click.echo("\n".join(text_table.lines(header, cells, right=("ranks", *header[2:]))))


if __name__ == "__main__":
    main()
