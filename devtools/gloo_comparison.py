"""Compares the c10d backend on a CPU with gloo, in the same processes: python -m devtools.gloo_comparison

The backends take turns at each call. Only the ratio of their times carries over to other machines.
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

from tricomm.perf import text_table
from tricomm.perf.workers import run_workers

_SIZES = (16, 16 * 1024, 1024 * 1024)
_LIMIT = timedelta(seconds=60)
_ROUNDS = 9
_CALLS = 30
_STEPS = ("ddp step", "fsdp2 step")


def measure(
    world_size: int, sizes: tuple[int, ...] = _SIZES, rounds: int = _ROUNDS, only: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """A record per call and size (float32 elements of a rank): medians of the rounds in microseconds, and their ratio.

    `only`: the names of the calls, default all.
    """
    settings = {"sizes": sizes, "rounds": rounds, "only": only}
    messages = run_workers("devtools.gloo_comparison:rank_main", world_size, settings, 900.0)
    return [message for rank, message in messages if rank == 0]


def rank_main(emit: Callable[..., None], rank: int, world_size: int, url: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size, timeout=_LIMIT)
    groups = {"ours": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=_LIMIT)}
    try:
        for count in settings["sizes"]:
            ways = {name: _calls(group, rank, world_size, count) for name, group in groups.items()}
            for call in (call for call in ways["ours"] if not settings["only"] or call in settings["only"]):
                took = _timed({name: way[call] for name, way in ways.items()}, settings["rounds"])
                emit("row", ranks=world_size, call=call, count=count, **_compared(took))
        for name in _STEPS:
            if not settings["only"] or name in settings["only"]:
                steps = {way: _step(name, group) for way, group in groups.items()}
                emit("row", ranks=world_size, call=name, count=0, **_compared(_timed(steps, settings["rounds"])))
    finally:
        dist.destroy_process_group()


def _calls(group: Any, rank: int, n: int, count: int) -> dict[str, Callable[[], Any]]:
    """Every call, with `count` elements per rank."""
    x, y = torch.ones(count), torch.empty(count)
    outs = [torch.empty(count) for _ in range(n)]
    whole = torch.empty(n * count)
    share = torch.empty(max(1, count // n))
    even = torch.empty(share.numel() * n)
    here = rank == 0
    peer = rank ^ 1
    alone = peer >= n

    def send_recv() -> None:
        if not alone:
            dist.send(x, peer, group) if rank % 2 == 0 else dist.recv(y, peer, group)
            dist.recv(y, peer, group) if rank % 2 == 0 else dist.send(x, peer, group)

    def batch() -> None:
        sent, received = (
            dist.P2POp(dist.isend, x, (rank + 1) % n, group),
            dist.P2POp(dist.irecv, y, (rank - 1) % n, group),
        )
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    small = {"rank": rank, "payload": list(range(min(count, 1024)))}
    objects: list[Any] = [None] * n
    return {
        "all_reduce": partial(dist.all_reduce, x, group=group),
        "broadcast": partial(dist.broadcast, x, 0, group=group),
        "reduce": partial(dist.reduce, x, 0, group=group),
        "all_gather": partial(dist.all_gather, outs, x, group=group),
        "all_gather_into_tensor": partial(dist.all_gather_into_tensor, whole, x, group=group),
        "reduce_scatter_tensor": partial(dist.reduce_scatter_tensor, share, even, group=group),
        "gather": partial(dist.gather, x, outs if here else None, 0, group=group),
        "scatter": partial(dist.scatter, y, outs if here else None, 0, group=group),
        "all_to_all_single": partial(dist.all_to_all_single, torch.empty_like(even), even, group=group),
        "barrier": partial(dist.barrier, group=group),
        "send + recv": send_recv,
        "batch_isend_irecv": batch,
        "all_gather_object": partial(dist.all_gather_object, objects, small, group=group),
        "broadcast_object_list": lambda: dist.broadcast_object_list([small], 0, group=group),
    }


def _step(name: str, group: Any) -> Callable[[], Any]:
    """A training step of a small model over `group`."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    if name == "ddp step":
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.ones(32, 256)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step


def _timed(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of each way, by round. The ways alternate."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, call in ways.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(_CALLS):
                call()
            if turn:  # the first is a warm-up
                took[name].append((time.perf_counter() - began) / _CALLS * 1e6)
    return took


def _compared(took: dict[str, list[float]]) -> dict[str, float]:
    record = {f"{name}_us": median(times) for name, times in took.items()}
    record["over_gloo"] = median(a / b for a, b in zip(took["ours"], took["gloo"], strict=True))
    return record


@click.command()
@click.option("--nproc", type=click.IntRange(2, 8), multiple=True, default=(2, 4), help="Ranks; several times.")
@click.option("--call", "only", multiple=True, help="Measure this call alone; several times.")
@click.option("--rounds", type=click.IntRange(1), default=_ROUNDS, show_default=True, help="Rounds of each backend.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(nproc: tuple[int, ...], only: tuple[str, ...], rounds: int, as_json: bool) -> None:
    """Print the times of a call on the CPU, and their ratio to gloo's."""
    rows = [row for world_size in nproc for row in measure(world_size, rounds=rounds, only=only)]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    header = ("ranks", "call", "elements", "ours us", "gloo us", "over gloo")
    cells = [
        (
            row["ranks"],
            row["call"],
            row["count"] or "-",
            f"{row['ours_us']:.0f}",
            f"{row['gloo_us']:.0f}",
            f"{row['over_gloo']:.2f}",
        )
        for row in rows
    ]
    click.echo("\n".join(text_table.lines(header, cells, right=("ranks", *header[2:]))))


if __name__ == "__main__":
    main()
