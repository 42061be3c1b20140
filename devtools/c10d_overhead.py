"""Host time of a small all_reduce over a launch that does nothing: python -m devtools.c10d_overhead

The host's part of a call on this machine, which is everything except CUDA's own launch, compared with
`dist.all_reduce` on torch's `fake` backend, which communicates nothing. Only the ratio carries over to other machines.
Nothing here is GPU time.
"""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import click
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from devtools.null_launch import communicator
from tricomm import Communicator
from tricomm.c10d.capabilities import GroupConfig, exchange_capabilities
from tricomm.c10d.fallback_backends import Backends
from tricomm.c10d.process_group import TricommGroup
from tricomm.perf import text_table


def measure(count: int = 1024, calls: int = 100, rounds: int = 301, fused: bool = False) -> dict[str, Any]:
    """Microseconds per call on `count` float32, the best of `rounds` of `calls` each, and ratios to the fake backend.
    `fused`: also for a fused call of one row with residual, RMSNorm and given outputs.

    A ratio is the median of the rounds' ratios, because the best times may be of different states of the machine.
    Rounds are shorter than a time slice, so that most of them pass undisturbed on a busy machine.
    """
    x, y = torch.ones(count), torch.ones(count)
    with ExitStack() as stack:
        stack.enter_context(_fake_backend())
        recorded = stack.enter_context(communicator())
        # no flight recorder, as in the fake backend
        stack.enter_context(patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="0"))
        comm = stack.enter_context(communicator())
        group, captured = stack.enter_context(_group(comm, x)), stack.enter_context(_capturing(x))
        calls_by_name: dict[str, Callable[[], Any]] = {
            "fake": lambda: dist.all_reduce(x),
            "c10d": lambda: dist.all_reduce(x, group=group),
            "communicator": lambda: comm.all_reduce(x),
            "recorded": lambda: recorded.all_reduce(x),
            "captured": lambda: captured.all_reduce(x),
            "out": lambda: comm.all_reduce(x, out=y),
            "all_gather": lambda: comm.all_gather(x, out=y),
            "reduce_scatter": lambda: comm.reduce_scatter(x, out=y),
            "broadcast": lambda: comm.broadcast(x, 0),
        }
        if fused:
            calls_by_name["fused"] = _fused(comm, count)
        took = _in_turns(calls_by_name, calls, rounds)
        counting = min(_counting(comm, calls) for _ in range(rounds))
    best = {name: min(all_us) for name, all_us in took.items()} | {"counting": counting}
    ratios = {
        f"{name}_over_fake": median(ours / fake for ours, fake in zip(took[name], took["fake"], strict=True))
        for name in took
        if name != "fake"
    }
    ratios |= {
        f"{name}_over_in_place": median(
            ours / base for ours, base in zip(took[name], took["communicator"], strict=True)
        )
        for name in ("out", "all_gather", "reduce_scatter", "broadcast")
    }
    best["recording"] = median(a - b for a, b in zip(took["recorded"], took["communicator"], strict=True))
    ratios["recording_share"] = best["recording"] / best["recorded"]
    ratios["counting_share"] = best["counting"] / best["communicator"]
    return {"count": count, "calls": calls, **{f"{name}_us": us for name, us in best.items()}, **ratios}


def _in_turns(calls_by_name: dict[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of each, one number per round. The order is reversed from round to round."""
    times: dict[str, list[float]] = {name: [] for name in calls_by_name}
    for run in calls_by_name.values():
        _clocked(run, calls)
    for number in range(rounds):
        for name in times if number % 2 else reversed(times):
            times[name].append(_clocked(calls_by_name[name], calls))
    return times


def _clocked(run: Callable[[], Any], calls: int) -> float:
    """Microseconds per call, averaged over `calls` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


@contextmanager
def _fake_backend() -> Iterator[None]:
    """torch's `fake` backend as the default group, which communicates nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _counting(comm: Communicator, calls: int) -> float:
    """An upper limit of the microseconds that statistics add to a call: their line of code in a loop."""
    chosen = next(iter(comm._planner.plans.values()))
    began = time.perf_counter()
    for _ in range(calls):
        chosen.tally.total += chosen.weight
    return (time.perf_counter() - began) / calls * 1e6


def _fused(comm: Communicator, count: int) -> Callable[[], Any]:
    """An all_reduce_rms_norm of one row."""
    x, residual, norm_out, residual_out = (torch.ones(1, count) for _ in range(4))
    weight = torch.ones(count)
    return lambda: comm.all_reduce_rms_norm(x, residual, weight, norm_out=norm_out, residual_out=residual_out)


@contextmanager
def _capturing(x: torch.Tensor) -> Iterator[Communicator]:
    """A communicator whose calls on tensors like `x` are captured."""
    with communicator() as comm:
        comm.all_reduce(x)
        gpu: Any = comm.gpu
        gpu.capturing = partial(operator.truth, True)
        try:
            yield comm
        finally:
            comm._launcher.captured = False  # no graph holds it, so its memory can be freed


@contextmanager
def _group(comm: Communicator, x: torch.Tensor) -> Iterator[TricommGroup]:
    """A c10d group of one rank whose all_reduces of tensors like `x` go to `comm`."""
    config = GroupConfig(HashStore(), 0, 1, timedelta(seconds=60), [0], "overhead")
    group = TricommGroup(config, exchange_capabilities(config.store, 0, 1, 60.0), Backends({}))
    comm.all_reduce(x)
    group._fast_path.learn(comm._internal, x, "sum")  # as after a first call on a GPU, for which `comm` stands
    ranks = dist.distributed_c10d._world.pg_group_ranks
    ranks[group] = {0: 0}
    try:
        yield group
    finally:
        del ranks[group]
        group._dispatcher.close()


@click.command()
@click.option("--count", type=click.IntRange(1), default=1024, show_default=True, help="Elements of float32.")
@click.option("--calls", type=click.IntRange(1), default=100, show_default=True, help="Calls per round.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(count: int, calls: int, as_json: bool) -> None:
    """Print the host time of an all_reduce whose kernel is never launched."""
    times = measure(count, calls, fused=True)
    if as_json:
        click.echo(json.dumps(times, indent=1))
        return
    click.echo(f"# all_reduce of {count} float32, host time of a call, kernel not launched; no GPU time")
    rows = [("dist.all_reduce, fake backend", f"{times['fake_us']:.2f}", "")]
    for name, text in (
        ("c10d", "dist.all_reduce, tricomm"),
        ("communicator", "Communicator.all_reduce"),
        ("captured", "Communicator.all_reduce, captured"),
        ("out", "Communicator.all_reduce, out="),
        ("all_gather", "Communicator.all_gather, out="),
        ("reduce_scatter", "Communicator.reduce_scatter, out="),
        ("broadcast", "Communicator.broadcast"),
        ("fused", "Communicator.all_reduce_rms_norm"),
    ):
        rows.append((text, f"{times[f'{name}_us']:.2f}", f"{times[f'{name}_over_fake']:.2f} x"))
    for what, text in (("counting", "of that, counting it (comm.stats())"), ("recording", "the flight recorder")):
        rows.append((text, f"{times[f'{what}_us']:.2f}", f"{times[f'{what}_share']:.2%}"))
    click.echo("\n".join(text_table.lines(("call", "us", "ratio"), rows, right=("us", "ratio"))))


if __name__ == "__main__":
    main()
