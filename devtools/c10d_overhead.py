"""Host time of a small all_reduce over a launch that does nothing: python -m devtools.c10d_overhead

What a call costs the host before a kernel runs, on this machine: all that tricomm does, with CUDA's last step left
out. Compared with `dist.all_reduce` on torch's own `fake` backend in the same run, which does nothing at all: only
the ratio says something about another machine. Nothing here is GPU time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tricomm import Communicator
from tricomm.c10d.capabilities import GroupConfig, exchange_capabilities
from tricomm.c10d.fallback_backends import Backends
from tricomm.c10d.process_group import TricommGroup
from tricomm.perf.null_launch import communicator


def measure(count: int = 1024, calls: int = 5000, rounds: int = 9) -> dict[str, Any]:
    """Microseconds per call, the best of `rounds` of `calls` each, and ratios to the fake backend. fp32, `count`.

    A ratio is of one round, the median of all: the two best may be of moments when the machine was not the same.
    """
    x = torch.ones(count)
    fake = _fake()
    comm = communicator()
    config = GroupConfig(HashStore(), 0, 1, timedelta(seconds=60), [0], "overhead")
    group = TricommGroup(config, exchange_capabilities(config.store, 0, 1, 60.0), Backends({}))
    comm.all_reduce(x)
    group._fast_path.learn(comm, x, "sum")  # as after a first call on a GPU, which `comm` stands for
    dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0}
    ways: dict[str, Callable[[], Any]] = {
        "fake": lambda: dist.all_reduce(x, group=fake),
        "c10d": lambda: dist.all_reduce(x, group=group),
        "communicator": lambda: comm.all_reduce(x),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    counting = float("inf")
    try:
        for _ in range(rounds):  # in turn, so that a busy moment of the machine hits all
            for name, call in ways.items():
                began = time.perf_counter()
                for _ in range(calls):
                    call()
                took[name].append((time.perf_counter() - began) / calls * 1e6)
            counting = min(counting, _counting(comm, calls))
    finally:
        del dist.distributed_c10d._world.pg_group_ranks[group]
        group._dispatcher.close()
        comm.close()
        dist.destroy_process_group()
    best = {name: min(all_us) for name, all_us in took.items()} | {"counting": counting}
    ratios = {
        f"{name}_over_fake": median(ours / fake for ours, fake in zip(took[name], took["fake"], strict=True))
        for name in ("c10d", "communicator")
    }
    ratios["counting_share"] = best["counting"] / best["communicator"]
    return {"count": count, "calls": calls, **{f"{name}_us": us for name, us in best.items()}, **ratios}


def _counting(comm: Communicator, calls: int) -> float:
    """Microseconds that the statistics add to a call, at most: the line of `Launcher.launch` and a loop around it."""
    chosen = next(iter(comm._planner.plans.values()))
    began = time.perf_counter()
    for _ in range(calls):
        chosen.tally.total += chosen.weight
    return (time.perf_counter() - began) / calls * 1e6


def _fake() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return dist.group.WORLD


@click.command()
@click.option("--count", type=click.IntRange(1), default=1024, show_default=True, help="Elements of float32.")
@click.option("--calls", type=click.IntRange(1), default=5000, show_default=True, help="Calls per round.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(count: int, calls: int, as_json: bool) -> None:
    """Print the host time of an all_reduce whose kernel is never launched."""
    found = measure(count, calls)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    click.echo(f"# all_reduce of {count} float32, host time of a call, kernel not launched; no GPU time")
    click.echo(f"{'dist.all_reduce, fake backend':<36}{found['fake_us']:>8.2f} us")
    for name, text in (("c10d", "dist.all_reduce, tricomm"), ("communicator", "Communicator.all_reduce")):
        click.echo(f"{text:<36}{found[f'{name}_us']:>8.2f} us{found[f'{name}_over_fake']:>8.2f} x")
    share = found["counting_share"]
    click.echo(f"{'of that, counting it (comm.stats())':<36}{found['counting_us']:>8.2f} us{share:>10.2%}")


if __name__ == "__main__":
    main()
