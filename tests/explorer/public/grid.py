"""A barrier of all blocks of one rank, as Triton-distributed and stream-K reductions have it, and a ticket lock.

Nothing of it leaves the rank, so gpu scope is enough.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.explorer.public.common import INT, Mistake, numbers, races, right
from tricomm import Communicator


@triton.jit
def _grid_barrier(counter, BUG: tl.constexpr):
    """A barrier of all blocks. The counter only grows, and a block that arrives computes the round from it."""
    blocks = tl.num_programs(0)
    scope: tl.constexpr = "cta" if BUG == "cta scope" else "gpu"
    sem: tl.constexpr = "relaxed" if BUG == "relaxed arrival" else "release"
    if BUG != "no barrier before the arrival":
        tl.debug_barrier()
    old = tl.atomic_add(counter, 1, sem=sem, scope=scope)  # @ arrive
    target = (old // blocks + 1) * blocks
    if BUG == "counter of one round":
        target = blocks
    if BUG == "plain poll":
        while tl.load(counter, volatile=True) < target:
            pass
    else:
        while tl.atomic_add(counter, 0, sem="acquire", scope=scope) < target:  # @ all arrived
            pass
    if BUG != "no barrier after the arrival":
        tl.debug_barrier()


@triton.jit
def grid_sum(x_ptr, out_ptr, partials, total, counter, tickets, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    """Each block writes a partial sum; after the barrier each adds its neighbour's to a total that a lock guards."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    scope: tl.constexpr = "cta" if BUG == "cta lock" else "gpu"
    tl.store(partials + block, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0), axis=0))  # @ partial
    if (BUG != "skips without work") | (block * BLOCK < n):
        _grid_barrier(counter, BUG)
    if BUG != "no lock":
        mine = tl.atomic_add(tickets, 1, sem="relaxed", scope=scope)  # @ ticket
        sem: tl.constexpr = "relaxed" if BUG == "relaxed lock" else "acquire"
        while tl.atomic_add(tickets + 1, 0, sem=sem, scope=scope) != mine:  # @ locked
            pass
        tl.debug_barrier()
    if BUG == "unlocks before the store":
        before = tl.load(total) + tl.load(partials + (block + 1) % blocks)  # @ old total
        tl.debug_barrier()
        tl.atomic_add(tickets + 1, 1, sem="release", scope=scope)
        tl.store(total, before)  # @ late total
    else:
        others = tl.load(partials + (block + 1) % blocks)  # @ neighbour
        tl.store(total, tl.load(total) + others)  # @ total
    if (BUG != "no lock") & (BUG != "unlocks before the store"):
        if BUG != "no barrier before the unlock":
            tl.debug_barrier()
        sem2: tl.constexpr = "relaxed" if BUG == "relaxed unlock" else "release"
        if (BUG != "one keeps the lock") | (block != 1):
            tl.atomic_add(tickets + 1, 1, sem=sem2, scope=scope)  # @ unlock
    if BUG != "reads without waiting":
        _grid_barrier(counter, BUG)
    if block == 0:
        tl.store(out_ptr, tl.load(total))  # @ read total
        tl.store(total, 0)  # @ clear total


def grid_sums(bug: str = "", blocks: int = 3, calls: int = 2, n: int = 7) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        shared, outs = comm.symmetric((blocks + 4,), INT).local, []
        partials, total, counter, tickets = shared.split((blocks, 1, 1, 2))
        total.zero_()
        for call in range(calls):
            x, out = numbers(comm.rank, call, n), torch.zeros(1, dtype=INT)
            comm.launch(grid_sum, blocks, x, out, partials, total, counter, tickets, n, BLOCK=4, BUG=bug)
            outs.append(out)
        return right(outs, [numbers(comm.rank, call, n).sum().reshape(1).to(INT) for call in range(calls)])

    return fn


MISTAKES = (
    *races("total, total", "no lock; relaxed lock; relaxed unlock; no barrier before the unlock", world_size=1),
    Mistake("relaxed arrival", 1, "race", pairs=("partial, neighbour",)),
    Mistake("plain poll", 1, "race", pairs=("partial, neighbour",)),
    Mistake("cta scope", 1, "scope", pairs=("arrive, arrive", "arrive, all arrived")),
    Mistake("no barrier before the arrival", 1, "race", pairs=("partial, neighbour",)),
    Mistake("no barrier after the arrival", 1, "race", pairs=("partial, neighbour", "total, read total")),
    Mistake("counter of one round", 1, "race", pairs=("partial, neighbour", "total, read total", "total, clear total")),
    Mistake("reads without waiting", 1, "race", pairs=("total, read total", "total, clear total")),
    Mistake("cta lock", 1, "scope", pairs=("ticket, ticket", "locked, unlock")),
    Mistake("unlocks before the store", 1, "race", pairs=("late total, old total",)),
    Mistake("one keeps the lock", 1, "deadlock", lone=("locked", "all arrived")),
)
