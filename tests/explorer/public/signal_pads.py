"""One-shot all-reduce with signal pads, as PyTorch's symmetric memory and kraken have it.

One word for every block and pair of ranks, set by compare-and-swap from 0 to 1 and taken from 1 to 0, so that it
needs no epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.explorer.public.common import INT, Mistake, races, run, sums, words
from tricomm import Communicator


@triton.jit
def _meet(pads, rank, WORLD: tl.constexpr, BUG: tl.constexpr):
    """Block b of every rank meets block b of every other."""
    scope: tl.constexpr = "gpu" if BUG == "gpu scope" else "sys"
    block = 0 if BUG == "pads shared by blocks" else tl.program_id(0)
    if BUG != "no barrier before the signal":
        tl.debug_barrier()
    for other in range(WORLD):
        slot = other if BUG == "wrong pad" else rank
        theirs = words(pads, other) + block * WORLD + slot
        sem: tl.constexpr = "relaxed" if BUG == "relaxed signal" else "release"
        while tl.atomic_cas(theirs, 0, 1, sem=sem, scope=scope) != 0:  # @ pad set
            pass
    for other in range(WORLD):
        mine = words(pads, rank) + block * WORLD + other
        sem2: tl.constexpr = "relaxed" if BUG == "relaxed wait" else "acquire"
        if BUG == "forgot to reset":
            while tl.atomic_add(mine, 0, sem=sem2, scope=scope) != 1:
                pass
        else:
            while tl.atomic_cas(mine, 1, 0, sem=sem2, scope=scope) != 1:  # @ pad taken
                pass
    if BUG != "no barrier after the wait":
        tl.debug_barrier()


@triton.jit
def one_shot(x_ptr, out_ptr, buffers, pads, rank, n, WORLD: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr):
    """Put one's own numbers where all can read them, meet, read everybody's, meet again before the next call."""
    step = tl.num_programs(0) * BLOCK
    if BUG == "signal before the store":
        _meet(pads, rank, WORLD, BUG)
    for first in range(tl.program_id(0) * BLOCK, n, step):
        at = first + tl.arange(0, BLOCK)
        tl.store(words(buffers, rank) + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)  # @ shot put
    if BUG != "signal before the store":
        _meet(pads, rank, WORLD, BUG)
    for first in range(tl.program_id(0) * BLOCK, n, step):
        at = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.int32)
        for other in range(WORLD):
            total += tl.load(words(buffers, other) + at, mask=at < n, other=0)  # @ shot read
        tl.store(out_ptr + at, total, mask=at < n)
    if BUG != "no trailing barrier":
        _meet(pads, rank, WORLD, BUG)


def one_shots(bug: str = "", blocks: int = 2, calls: int = 2, n: int = 7) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        buffers, pads = comm.symmetric((n,), INT).table, comm.symmetric((blocks * comm.world_size,), INT).table

        def launch(x: torch.Tensor, out: torch.Tensor, call: int) -> None:
            run(comm, one_shot, blocks, x, out, buffers, pads, comm.rank, n, bug=bug)

        return sums(comm, calls, n, launch)

    return fn


SMALLEST = {"blocks": 1, "n": 3}
MISTAKES = (
    *races(
        "shot put, shot read",
        "relaxed signal; relaxed wait; no barrier before the signal; no barrier after the wait; no trailing barrier",
    ),
    Mistake("gpu scope", 2, "scope", pairs=("pad set, pad taken", "pad set, pad set", "pad taken, pad taken")),
    Mistake("signal before the store", 2, "race uninitialised", pairs=("shot put, shot read",), lone=("shot read",)),
    Mistake("wrong pad", 2, "deadlock", lone=("pad set", "pad taken")),
)
