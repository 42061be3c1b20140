"""All-reduce under a lock for every tile, as Iris has it.

Each rank adds its numbers to everybody's output in turn, with ordinary loads and stores between compare-and-swap and
exchange at sys scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.explorer.public.common import INT, Mistake, numbers, races, right, run, summed, words
from tricomm import Communicator


@triton.jit
def lock_sum(x_ptr, sums, locks, n, WORLD: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr):
    block = tl.program_id(0)
    scope: tl.constexpr = "gpu" if BUG == "gpu scope" else "sys"
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    for other in range(WORLD):
        lock = words(locks, other) + block
        there = words(sums, other) + at
        if BUG == "test and set apart":
            while tl.atomic_add(lock, 0, sem="acquire", scope=scope) != 0:
                pass
            tl.atomic_xchg(lock, 1, sem="acquire", scope=scope)
        else:
            sem: tl.constexpr = "relaxed" if BUG == "relaxed lock" else "acquire"
            while tl.atomic_cas(lock, 0, 1, sem=sem, scope=scope) != 0:  # @ tile locked
                pass
        if BUG != "no barrier after the lock":
            tl.debug_barrier()
        tl.store(there, tl.load(there, mask=mask) + x, mask=mask)  # @ tile sum
        if BUG != "no barrier before the unlock":
            tl.debug_barrier()
        if BUG == "plain unlock":
            tl.store(lock, 0)  # @ plain unlock
        elif BUG == "relaxed unlock":
            tl.atomic_xchg(lock, 0, sem="relaxed", scope=scope)
        elif (BUG != "forgot one unlock") | (other != WORLD - 1):
            tl.atomic_xchg(lock, 0, sem="release", scope=scope)  # @ tile unlocked


def lock_sums(bug: str = "", blocks: int = 2, n: int = 7) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        sums, locks = comm.symmetric((n,), INT), comm.symmetric((blocks,), INT)
        sums.local.zero_()
        comm.barrier()
        run(comm, lock_sum, blocks, numbers(comm.rank, 0, n), sums.table, locks.table, n, bug=bug)
        comm.barrier()
        assert not locks.local.any(), "a lock is held"
        out = sums.local.clone()
        return right([out], [summed(comm.world_size, 0, n)])

    return fn


SMALLEST = {"blocks": 1, "n": 3}
MISTAKES = (
    *races(
        "tile sum, tile sum",
        "relaxed lock; relaxed unlock; no barrier after the lock; no barrier before the unlock; test and set apart",
    ),
    Mistake("gpu scope", 2, "scope", pairs=("tile locked, tile locked", "tile locked, tile unlocked")),
    Mistake("plain unlock", 2, "race", pairs=("plain unlock, tile locked",)),
    Mistake("forgot one unlock", 2, "deadlock", lone=("tile locked",)),
)
