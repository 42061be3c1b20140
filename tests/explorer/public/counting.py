"""Two-shot all-reduce whose barrier is a counter that only grows.

As vLLM's and TensorRT-LLM's custom all-reduces have it: every rank adds one to everybody's counter, and waits until
its own has come to a multiple of the world size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.explorer.public.common import INT, Mistake, races, run, sums
from tricomm import Communicator


@triton.jit
def _count_in(counters, rank, target, WORLD: tl.constexpr, BUG: tl.constexpr):
    """Tell everybody, and wait until the own counter is at `target`."""
    block = tl.program_id(0)
    if BUG != "no barrier before the count":
        tl.debug_barrier()
    scope: tl.constexpr = "gpu" if BUG == "gpu count" else "sys"
    sem: tl.constexpr = "relaxed" if BUG == "relaxed count" else "release"
    for other in tl.static_range(WORLD):
        if (BUG != "counts without itself") | (rank != other):
            tl.atomic_add(counters[other] + block, 1, sem=sem, scope=scope)  # @ count
    enough = target - 1 if BUG == "waits for one less" else target
    for other in tl.static_range(WORLD):
        if rank == other:
            if BUG == "plain poll":
                while tl.load(counters[other] + block, volatile=True) < enough:
                    pass
            elif BUG == "relaxed poll":
                while tl.atomic_add(counters[other] + block, 0, sem="relaxed", scope="sys") < enough:
                    pass
            elif BUG == "waits for the exact count":
                while tl.atomic_add(counters[other] + block, 0, sem="acquire", scope="sys") != enough:  # @ exact
                    pass
            else:
                while tl.atomic_add(counters[other] + block, 0, sem="acquire", scope="sys") < enough:  # @ counted
                    pass
    if BUG != "no barrier after the count":
        tl.debug_barrier()


@triton.jit
def two_shot(
    x_ptr,
    out_ptr,
    staged,
    reduced,
    counters,
    rank,
    call,
    n,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    BUG: tl.constexpr,
):
    """Each rank stages its numbers, sums one shard of everybody's, and gathers the sums. Block b does stripe b."""
    shard = tl.cdiv(n, WORLD)
    step = tl.num_programs(0) * BLOCK
    rounds = 3 if (BUG != "no trailing barrier") & (BUG != "in place, no trailing barrier") else 2
    if BUG == "no barrier between the shots":
        rounds = 2
    base = call * rounds * WORLD
    for part in tl.static_range(WORLD):  # the stripes of every shard, so that the same block reads what it wrote
        for first in range(tl.program_id(0) * BLOCK, shard, step):
            lane = first + tl.arange(0, BLOCK)
            at = part * shard + lane
            mask = (lane < shard) & (at < n)
            for other in tl.static_range(WORLD):
                if rank == other:
                    tl.store(staged[other] + at, tl.load(x_ptr + at, mask=mask), mask=mask)  # @ stage
    _count_in(counters, rank, base + WORLD, WORLD, BUG)
    mine = rank * shard
    if (BUG != "skips without work") | (mine + tl.program_id(0) * BLOCK < n):
        for first in range(tl.program_id(0) * BLOCK, shard, step):
            lane = first + tl.arange(0, BLOCK)
            at = mine + lane
            mask = (at <= n) & (lane <= shard) if BUG == "one too many" else (lane < shard) & (at < n)
            total = tl.zeros([BLOCK], tl.int32)
            for other in tl.static_range(WORLD):
                total += tl.load(staged[other] + at, mask=mask, other=0)  # @ reduce
            for other in tl.static_range(WORLD):
                if rank == other:
                    tl.store(reduced[other] + at, total, mask=mask)  # @ keep sum
        if BUG != "no barrier between the shots":
            _count_in(counters, rank, base + 2 * WORLD, WORLD, BUG)
    for owner in tl.static_range(WORLD):
        for first in range(tl.program_id(0) * BLOCK, shard, step):
            lane = first + tl.arange(0, BLOCK)
            at = owner * shard + lane
            mask = (lane < shard) & (at < n)
            tl.store(out_ptr + at, tl.load(reduced[owner] + at, mask=mask), mask=mask)  # @ collect
    if (BUG != "no trailing barrier") & (BUG != "in place, no trailing barrier"):
        _count_in(counters, rank, base + rounds * WORLD, WORLD, BUG)


def two_shots(bug: str = "", blocks: int = 2, calls: int = 2, n: int = 13) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        staged = comm.symmetric((n,), INT).peers
        reduced = staged if bug == "in place, no trailing barrier" else comm.symmetric((n,), INT).peers
        counters = comm.symmetric((blocks,), INT).peers

        def launch(x: torch.Tensor, out: torch.Tensor, call: int) -> None:
            run(comm, two_shot, blocks, x, out, staged, reduced, counters, comm.rank, call, n, bug=bug)

        return sums(comm, calls, n, launch)

    return fn


SMALLEST = {"blocks": 1, "n": 3}
MISTAKES = (
    *races("stage, reduce", "relaxed count; relaxed poll; plain poll"),
    Mistake("gpu count", 2, "scope", pairs=("count, count", "count, counted")),
    Mistake("no barrier before the count", 2, "race", pairs=("stage, reduce", "keep sum, collect")),
    Mistake("no barrier after the count", 2, "race", pairs=("stage, reduce", "keep sum, collect")),
    Mistake("no barrier between the shots", 2, "race uninitialised", pairs=("keep sum, collect",), lone=("collect",)),
    Mistake("in place, no trailing barrier", 2, "race", pairs=("stage, collect",)),
    Mistake("one too many", 2, "out_of_bounds race", pairs=("keep sum, collect",), lone=("reduce",)),
    Mistake("waits for one less", 2, "race", pairs=("stage, reduce", "keep sum, collect")),
    Mistake("counts without itself", 2, "deadlock", lone=("counted",)),
    Mistake("waits for the exact count", 2, "deadlock", lone=("exact",)),
    Mistake(
        "skips without work",
        3,
        "race uninitialised deadlock",
        pairs=("keep sum, collect",),
        lone=("collect", "counted"),
    ),
)
