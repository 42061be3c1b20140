"""Ring all-gather with step counters, as Iris has it.

Everybody pulls from its predecessor what that one has, and says how many steps it has done. Nobody leaves before its
successor has taken everything: the next call overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.explorer.public.common import INT, Mistake, gathers, run, words
from tricomm import Communicator


@triton.jit
def ring_gather(
    x_ptr, out_ptr, rows, steps, taken, rank, call, n, WORLD: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr
):
    """`steps` counts in one's own memory and is read by the successor; `taken` is written by the successor."""
    block = tl.program_id(0)
    talks = (BUG != "only block 0 waits") | (block == 0)
    slot = 0 if BUG == "only block 0 waits" else block
    scope: tl.constexpr = "gpu" if BUG == "gpu scope" else "sys"
    before = (rank + WORLD - 1) % WORLD
    source = (rank + 1) % WORLD if BUG == "waits for the wrong neighbour" else before
    own, theirs = words(rows, rank), words(rows, before)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(own + rank * n + at, tl.load(x_ptr + at, mask=mask), mask=mask)  # @ ring own
    for step in range(1, WORLD):
        if BUG != "no barrier before the step":
            tl.debug_barrier()
        if talks:
            sem: tl.constexpr = "relaxed" if BUG == "relaxed step" else "release"
            tl.atomic_add(words(steps, rank) + slot, 1, sem=sem, scope=scope)  # @ step done
            wanted = call * (WORLD - 1) + step
            if BUG == "one step too early":
                wanted = wanted - 1
            sem2: tl.constexpr = "relaxed" if BUG == "relaxed wait" else "acquire"
            while tl.atomic_add(words(steps, source) + slot, 0, sem=sem2, scope=scope) < wanted:  # @ step waited
                pass
        if BUG != "no barrier after the wait":
            tl.debug_barrier()
        part = (rank + WORLD - step) % WORLD
        got = tl.load(theirs + part * n + at, mask=mask)  # @ ring pull
        tl.store(own + part * n + at, got, mask=mask)  # @ ring pass on
    for part in range(WORLD):
        tl.store(out_ptr + part * n + at, tl.load(own + part * n + at, mask=mask), mask=mask)  # @ ring out
    tl.debug_barrier()
    if talks:
        tl.atomic_add(words(taken, before) + slot, 1, sem="release", scope="sys")  # @ give back
        if BUG != "leaves without asking":
            while tl.atomic_add(words(taken, rank) + slot, 0, sem="acquire", scope="sys") <= call:  # @ taken
                pass
    tl.debug_barrier()


def ring_gathers(bug: str = "", blocks: int = 2, calls: int = 2, n: int = 7) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        rank, rows = comm.rank, comm.symmetric((comm.world_size, n), INT).table
        steps, taken = comm.symmetric((blocks,), INT).table, comm.symmetric((blocks,), INT).table

        def launch(x: torch.Tensor, out: torch.Tensor, call: int) -> None:
            run(comm, ring_gather, blocks, x, out, rows, steps, taken, rank, call, n, bug=bug)

        return gathers(comm, calls, n, launch)

    return fn


SMALLEST = {"blocks": 1, "n": 3}
MISTAKES = (
    Mistake("relaxed step", 3, "race", pairs=("ring own, ring pull", "ring pass on, ring pull")),
    Mistake("relaxed wait", 3, "race", pairs=("ring own, ring pull", "ring pass on, ring pull")),
    Mistake("gpu scope", 2, "scope", pairs=("step done, step waited",)),
    Mistake("no barrier before the step", 3, "race", pairs=("ring own, ring pull", "ring pass on, ring pull")),
    Mistake("no barrier after the wait", 3, "race", pairs=("ring own, ring pull", "ring pass on, ring pull")),
    Mistake("one step too early", 2, "race uninitialised", pairs=("ring own, ring pull",), lone=("ring pull",)),
    Mistake("only block 0 waits", 2, "race uninitialised", pairs=("ring own, ring pull",), lone=("ring pull",)),
    Mistake("leaves without asking", 2, "race", pairs=("ring own, ring pull",)),
    Mistake(
        "waits for the wrong neighbour",
        3,
        "race uninitialised",
        pairs=("ring own, ring pull", "ring pass on, ring pull"),
        lone=("ring pull",),
    ),
)
