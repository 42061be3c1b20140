"""Communication kernels of kinds that public Triton code has, each right, and wrong in ways that happen.

Nothing of what they are modelled on is copied; each docstring says where its protocol is known from. The constexpr
BUG chooses a mistake; "" is the right version. `#@ name` marks a line that a finding may have to name (`line`).
Every family has a function that makes `fn(comm)` for `tricomm.simulate` and `tricomm.check`: two calls or more, one
after another over the same memory, whose results `fn` checks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tricomm import Communicator

INT = torch.int32
_marks = {
    text.split("#@")[1].strip(): number
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
    if "#@" in text and "`" not in text
}


def line(mark: str) -> int:
    """The number of the line that carries `mark`."""
    return _marks[mark]


def numbers(comm_rank: int, call: int, count: int) -> torch.Tensor:
    """An input that differs in every element, call and rank."""
    return (torch.arange(count, dtype=INT) * 7 + 1) * (comm_rank + 1) + 1000 * call


def summed(world_size: int, call: int, count: int) -> torch.Tensor:
    return torch.stack([numbers(r, call, count) for r in range(world_size)]).sum(0).to(INT)


def right(outs: list[torch.Tensor], expected: list[torch.Tensor]) -> list[torch.Tensor]:
    """Only when all calls are over: a rank that stops in the middle would leave its peers in their kernels."""
    assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True)), (outs, expected)
    return outs


# One-shot all-reduce with signal pads, as PyTorch's symmetric memory and kraken have it: one word for every block and
# pair of ranks, set by compare-and-swap from 0 to 1 and taken from 1 to 0, so that it needs no epoch.


@triton.jit
def _words(table, rank):
    """Where `rank`'s memory begins."""
    return tl.load(table + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def _meet(pads, rank, WORLD: tl.constexpr, BUG: tl.constexpr):
    """Block b of every rank meets block b of every other."""
    scope: tl.constexpr = "gpu" if BUG == "gpu scope" else "sys"
    block = 0 if BUG == "pads shared by blocks" else tl.program_id(0)
    if BUG != "no barrier before the signal":
        tl.debug_barrier()
    for other in range(WORLD):
        slot = other if BUG == "wrong pad" else rank
        theirs = _words(pads, other) + block * WORLD + slot
        sem: tl.constexpr = "relaxed" if BUG == "relaxed signal" else "release"
        while tl.atomic_cas(theirs, 0, 1, sem=sem, scope=scope) != 0:  #@ pad set
            pass
    for other in range(WORLD):
        mine = _words(pads, rank) + block * WORLD + other
        sem2: tl.constexpr = "relaxed" if BUG == "relaxed wait" else "acquire"
        if BUG == "forgot to reset":
            while tl.atomic_add(mine, 0, sem=sem2, scope=scope) != 1:
                pass
        else:
            while tl.atomic_cas(mine, 1, 0, sem=sem2, scope=scope) != 1:  #@ pad taken
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
        tl.store(_words(buffers, rank) + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)  #@ shot put
    if BUG != "signal before the store":
        _meet(pads, rank, WORLD, BUG)
    for first in range(tl.program_id(0) * BLOCK, n, step):
        at = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.int32)
        for other in range(WORLD):
            total += tl.load(_words(buffers, other) + at, mask=at < n, other=0)  #@ shot read
        tl.store(out_ptr + at, total, mask=at < n)
    if BUG != "no trailing barrier":
        _meet(pads, rank, WORLD, BUG)


def one_shots(bug: str = "", blocks: int = 2, calls: int = 2, n: int = 7) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        buffers, pads = comm.symmetric((n,), INT), comm.symmetric((blocks * comm.world_size,), INT)
        outs = []
        for call in range(calls):
            out = torch.zeros(n, dtype=INT)
            comm.launch(
                one_shot, blocks, numbers(comm.rank, call, n), out, buffers.table, pads.table, comm.rank, n,
                WORLD=comm.world_size, BLOCK=4, BUG=bug,
            )  # fmt: skip
            outs.append(out)
        return right(outs, [summed(comm.world_size, call, n) for call in range(calls)])

    return fn


# Push all-gather with a flag that is the number of the call, as Triton-distributed's low-latency kernels have it: two
# rooms used in turn, and nobody ever resets anything. Whoever sends in call e + 2 has seen everybody in call e + 1.


@triton.jit
def push_gather(
    x_ptr, out_ptr, rooms, flags, rank, call, n,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    """Block b of each rank sends every peer its share of the numbers, then the flag; waits for the peers' block b."""
    block = tl.program_id(0)
    room = 0 if BUG == "one room" else call & 1
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at <= n if BUG == "one too many" else at < n
    flag = 1 if BUG == "flag without epoch" else call + 1
    slot = (room * WORLD + rank) * tl.num_programs(0) + block
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    for other in tl.static_range(WORLD):
        if BUG == "flag before the data":
            tl.debug_barrier()
            tl.atomic_xchg(flags[other] + slot, flag, sem="release", scope="sys")
        source = other if BUG == "wrong room" else rank
        tl.store(rooms[other] + (room * WORLD + source) * n + at, x, mask=mask)  #@ push data
    if BUG != "no barrier before the flag":
        tl.debug_barrier()
    for other in tl.static_range(WORLD):
        if BUG == "relaxed flag":
            tl.atomic_xchg(flags[other] + slot, flag, sem="relaxed", scope="sys")
        elif BUG == "plain flag":
            tl.store(flags[other] + slot, flag)  #@ push plain flag
        elif BUG != "flag before the data":
            tl.atomic_xchg(flags[other] + slot, flag, sem="release", scope="sys")  #@ push flag
    for other in tl.static_range(WORLD):
        if rank == other:
            lane = tl.arange(0, LANES)
            mine = flags[other] + (room * WORLD + lane % WORLD) * tl.num_programs(0) + block
            late = 1
            while late != 0:
                if BUG == "plain poll":
                    seen = tl.load(mine, volatile=True)  #@ push plain poll
                elif BUG == "relaxed poll":
                    seen = tl.atomic_add(mine, tl.zeros([LANES], tl.int32), sem="relaxed", scope="sys")
                elif BUG == "gpu poll":
                    seen = tl.atomic_add(mine, tl.zeros([LANES], tl.int32), sem="acquire", scope="gpu")
                else:
                    seen = tl.atomic_add(mine, tl.zeros([LANES], tl.int32), sem="acquire", scope="sys")  #@ push poll
                missing = seen != flag
                if BUG == "waits for all but one":
                    missing = missing & (lane % WORLD != WORLD - 1)
                late = tl.max(missing.to(tl.int32), axis=0)
            if BUG != "no barrier after the poll":
                tl.debug_barrier()
            for source in tl.static_range(WORLD):
                got = tl.load(rooms[other] + (room * WORLD + source) * n + at, mask=at < n)  #@ push read
                tl.store(out_ptr + source * n + at, got, mask=at < n)


def push_gathers(bug: str = "", blocks: int = 2, calls: int = 3, n: int = 7) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        world, outs = comm.world_size, []
        rooms, flags = comm.symmetric((2, world, n), INT), comm.symmetric((2, world, blocks), INT)
        for call in range(calls):
            out = torch.zeros(world * n, dtype=INT)
            comm.launch(
                push_gather, blocks, numbers(comm.rank, call, n), out, rooms.peers, flags.peers, comm.rank, call, n,
                WORLD=world, BLOCK=4, LANES=triton.next_power_of_2(world), BUG=bug,
            )  # fmt: skip
            outs.append(out)
        return right(outs, [torch.cat([numbers(r, c, n) for r in range(world)]) for c in range(calls)])

    return fn


# Two-shot all-reduce whose barrier is a counter that only grows, as vLLM's and TensorRT-LLM's custom all-reduces have
# it: every rank adds one to everybody's counter, and waits until its own has come to a multiple of the world size.


@triton.jit
def _count_in(counters, rank, target, WORLD: tl.constexpr, BUG: tl.constexpr):
    """Tell everybody, and wait until the own counter is at `target`."""
    block = tl.program_id(0)
    if BUG != "no barrier before the count":
        tl.debug_barrier()
    for other in tl.static_range(WORLD):
        scope: tl.constexpr = "gpu" if BUG == "gpu count" else "sys"
        sem: tl.constexpr = "relaxed" if BUG == "relaxed count" else "release"
        if (BUG != "counts without itself") | (rank != other):
            tl.atomic_add(counters[other] + block, 1, sem=sem, scope=scope)  #@ count
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
                while tl.atomic_add(counters[other] + block, 0, sem="acquire", scope="sys") != enough:  #@ exact
                    pass
            else:
                while tl.atomic_add(counters[other] + block, 0, sem="acquire", scope="sys") < enough:  #@ counted
                    pass
    if BUG != "no barrier after the count":
        tl.debug_barrier()


@triton.jit
def two_shot(
    x_ptr, out_ptr, staged, reduced, counters, rank, call, n, WORLD: tl.constexpr, BLOCK: tl.constexpr,
    BUG: tl.constexpr,
):  # fmt: skip
    """Each rank stages its numbers, sums one shard of everybody's, and gathers the sums. Block b does stripe b."""
    shard = tl.cdiv(n, WORLD)
    step = tl.num_programs(0) * BLOCK
    base = call * 3 * WORLD
    for part in tl.static_range(WORLD):  # the stripes of every shard, so that the same block reads what it wrote
        for first in range(tl.program_id(0) * BLOCK, shard, step):
            lane = first + tl.arange(0, BLOCK)
            at = part * shard + lane
            mask = (lane < shard) & (at < n)
            for other in tl.static_range(WORLD):
                if rank == other:
                    tl.store(staged[other] + at, tl.load(x_ptr + at, mask=mask), mask=mask)  #@ stage
    _count_in(counters, rank, base + WORLD, WORLD, BUG)
    mine = rank * shard
    if (BUG != "skips without work") | (mine + tl.program_id(0) * BLOCK < n):
        for first in range(tl.program_id(0) * BLOCK, shard, step):
            lane = first + tl.arange(0, BLOCK)
            at = mine + lane
            mask = (at <= n) & (lane <= shard) if BUG == "one too many" else (lane < shard) & (at < n)
            total = tl.zeros([BLOCK], tl.int32)
            for other in tl.static_range(WORLD):
                total += tl.load(staged[other] + at, mask=mask, other=0)  #@ reduce
            for other in tl.static_range(WORLD):
                if rank == other:
                    tl.store(reduced[other] + at, total, mask=mask)  #@ keep sum
        if BUG != "no barrier between the shots":
            _count_in(counters, rank, base + 2 * WORLD, WORLD, BUG)
    for owner in tl.static_range(WORLD):
        for first in range(tl.program_id(0) * BLOCK, shard, step):
            lane = first + tl.arange(0, BLOCK)
            at = owner * shard + lane
            mask = (lane < shard) & (at < n)
            tl.store(out_ptr + at, tl.load(reduced[owner] + at, mask=mask), mask=mask)  #@ collect
    if BUG != "no trailing barrier":
        _count_in(counters, rank, base + 3 * WORLD, WORLD, BUG)


def two_shots(bug: str = "", blocks: int = 2, calls: int = 2, n: int = 13) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        staged, reduced = comm.symmetric((n,), INT), comm.symmetric((n,), INT)
        counters, outs = comm.symmetric((blocks,), INT), []
        for call in range(calls):
            out = torch.zeros(n, dtype=INT)
            comm.launch(
                two_shot, blocks, numbers(comm.rank, call, n), out, staged.peers, reduced.peers, counters.peers,
                comm.rank, call, n, WORLD=comm.world_size, BLOCK=4, BUG=bug,
            )  # fmt: skip
            outs.append(out)
        return right(outs, [summed(comm.world_size, call, n) for call in range(calls)])

    return fn


# Ring all-gather with step counters, as Iris has it: everybody pulls from its predecessor what that one has, and says
# how many steps it has done. Nobody leaves before its successor has taken everything: the next call overwrites it.


@triton.jit
def ring_gather(
    x_ptr, out_ptr, rows, steps, taken, rank, call, n, WORLD: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    """`steps` counts in one's own memory and is read by the successor; `taken` is written by the successor."""
    block = tl.program_id(0)
    talks = (BUG != "only block 0 waits") | (block == 0)
    slot = 0 if BUG == "only block 0 waits" else block
    scope: tl.constexpr = "gpu" if BUG == "gpu scope" else "sys"
    before = (rank + WORLD - 1) % WORLD
    source = (rank + 1) % WORLD if BUG == "waits for the wrong neighbour" else before
    own, theirs = _words(rows, rank), _words(rows, before)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(own + rank * n + at, tl.load(x_ptr + at, mask=mask), mask=mask)  #@ ring own
    for step in range(1, WORLD):
        if BUG != "no barrier before the step":
            tl.debug_barrier()
        if talks:
            sem: tl.constexpr = "relaxed" if BUG == "relaxed step" else "release"
            tl.atomic_add(_words(steps, rank) + slot, 1, sem=sem, scope=scope)  #@ step done
            wanted = call * (WORLD - 1) + step
            if BUG == "one step too early":
                wanted = wanted - 1
            sem2: tl.constexpr = "relaxed" if BUG == "relaxed wait" else "acquire"
            while tl.atomic_add(_words(steps, source) + slot, 0, sem=sem2, scope=scope) < wanted:  #@ step waited
                pass
        if BUG != "no barrier after the wait":
            tl.debug_barrier()
        part = (rank + WORLD - step) % WORLD
        got = tl.load(theirs + part * n + at, mask=mask)  #@ ring pull
        tl.store(own + part * n + at, got, mask=mask)  #@ ring pass on
    for part in range(WORLD):
        tl.store(out_ptr + part * n + at, tl.load(own + part * n + at, mask=mask), mask=mask)  #@ ring out
    tl.debug_barrier()
    if talks:
        tl.atomic_add(_words(taken, before) + slot, 1, sem="release", scope="sys")  #@ give back
        if BUG != "leaves without asking":
            while tl.atomic_add(_words(taken, rank) + slot, 0, sem="acquire", scope="sys") <= call:  #@ taken
                pass
    tl.debug_barrier()


def ring_gathers(bug: str = "", blocks: int = 2, calls: int = 2, n: int = 7) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        world, outs = comm.world_size, []
        rows = comm.symmetric((world, n), INT)
        steps, taken = comm.symmetric((blocks,), INT), comm.symmetric((blocks,), INT)
        for call in range(calls):
            out = torch.zeros(world * n, dtype=INT)
            comm.launch(
                ring_gather, blocks, numbers(comm.rank, call, n), out, rows.table, steps.table, taken.table, comm.rank,
                call, n, WORLD=world, BLOCK=4, BUG=bug,
            )  # fmt: skip
            outs.append(out)
        return right(outs, [torch.cat([numbers(r, c, n) for r in range(world)]) for c in range(calls)])

    return fn


# A queue from rank 0 to rank 1 with credits, as message passing examples and MSCCL++'s and NCCL's FIFOs have it: the
# producer may be DEPTH messages ahead of what the consumer has given back.


@triton.jit
def queue(
    x_ptr, out_ptr, slots, heads, tails, rank, messages,
    DEPTH: tl.constexpr, SIZE: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    """Rank 0 writes into rank 1's slots and its head; rank 1 writes rank 0's tail."""
    lane = tl.arange(0, SIZE)
    if rank == 0:
        for i in range(messages):
            ahead = DEPTH + 1 if BUG == "one credit too many" else DEPTH
            if BUG != "no credits":
                while tl.atomic_add(tails[0], 0, sem="acquire", scope="sys") + ahead <= i:  #@ credit
                    pass
            tl.debug_barrier()
            if BUG == "head before the data":
                tl.atomic_xchg(heads[1], i + 1, sem="release", scope="sys")
            slot = slots[1] + i % DEPTH * SIZE
            tl.store(slot + lane, tl.load(x_ptr + i * SIZE + lane))  #@ produce
            if BUG != "no barrier before the head":
                tl.debug_barrier()
            if BUG == "head in the wrong memory":
                tl.atomic_xchg(heads[0], i + 1, sem="release", scope="sys")
            elif BUG == "plain head":
                tl.store(heads[1], i + 1)  #@ plain head
            elif BUG == "relaxed head":
                tl.atomic_xchg(heads[1], i + 1, sem="relaxed", scope="sys")
            elif BUG != "head before the data":
                tl.atomic_xchg(heads[1], i + 1, sem="release", scope="sys")  #@ head
        while tl.atomic_add(tails[0], 0, sem="acquire", scope="sys") < messages:  #@ all given back
            pass
    if rank == 1:
        for i in range(messages):
            if BUG == "looks only once":
                tl.atomic_add(heads[1], 0, sem="acquire", scope="sys")
            elif BUG == "plain poll":
                while tl.load(heads[1], volatile=True) <= i:  #@ head plain poll
                    pass
            else:
                while tl.atomic_add(heads[1], 0, sem="acquire", scope="sys") <= i:  #@ head waited
                    pass
            tl.debug_barrier()
            if BUG == "credit before the read":
                tl.atomic_add(tails[0], 1, sem="release", scope="sys")
            got = tl.load(slots[1] + i % DEPTH * SIZE + lane)  #@ consume
            tl.store(out_ptr + i * SIZE + lane, got)
            if BUG != "no barrier before the credit":
                tl.debug_barrier()
            if BUG == "relaxed credit":
                tl.atomic_add(tails[0], 1, sem="relaxed", scope="sys")
            elif BUG == "gpu credit":
                tl.atomic_add(tails[0], 1, sem="release", scope="gpu")  #@ gpu credit
            elif BUG != "credit before the read":
                tl.atomic_add(tails[0], 1, sem="release", scope="sys")  #@ give credit


def queues(bug: str = "", messages: int = 5, depth: int = 2) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> torch.Tensor:
        slots, heads, tails = comm.symmetric((depth, 4), INT), comm.symmetric((1,), INT), comm.symmetric((1,), INT)
        x, out = numbers(0, 0, messages * 4), torch.zeros(messages * 4, dtype=INT)
        comm.launch(
            queue, 1, x, out, slots.peers, heads.peers, tails.peers, comm.rank, messages, DEPTH=depth, SIZE=4, BUG=bug
        )
        assert comm.rank != 1 or torch.equal(out, x)
        return out

    return fn


# Inside one rank: a barrier of all blocks, as Triton-distributed and stream-K reductions have it, and a ticket lock.
# Nothing of it leaves the rank, so gpu scope is enough.


@triton.jit
def _grid_barrier(counter, BUG: tl.constexpr):
    """All blocks meet. The counter only grows: whoever arrives reads from it which round it is."""
    blocks = tl.num_programs(0)
    scope: tl.constexpr = "cta" if BUG == "cta scope" else "gpu"
    sem: tl.constexpr = "relaxed" if BUG == "relaxed arrival" else "release"
    if BUG != "no barrier before the arrival":
        tl.debug_barrier()
    old = tl.atomic_add(counter, 1, sem=sem, scope=scope)  #@ arrive
    target = (old // blocks + 1) * blocks
    if BUG == "counter of one round":
        target = blocks
    if BUG == "plain poll":
        while tl.load(counter, volatile=True) < target:
            pass
    else:
        while tl.atomic_add(counter, 0, sem="acquire", scope=scope) < target:  #@ all arrived
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
    tl.store(partials + block, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0), axis=0))  #@ partial
    if (BUG != "skips without work") | (block * BLOCK < n):
        _grid_barrier(counter, BUG)
    if BUG != "no lock":
        mine = tl.atomic_add(tickets, 1, sem="relaxed", scope=scope)
        sem: tl.constexpr = "relaxed" if BUG == "relaxed lock" else "acquire"
        while tl.atomic_add(tickets + 1, 0, sem=sem, scope=scope) != mine:  #@ locked
            pass
        tl.debug_barrier()
    if BUG == "unlocks before the store":
        before = tl.load(total) + tl.load(partials + (block + 1) % blocks)
        tl.debug_barrier()
        tl.atomic_add(tickets + 1, 1, sem="release", scope=scope)
        tl.store(total, before)  #@ late total
    else:
        others = tl.load(partials + (block + 1) % blocks)  #@ neighbour
        tl.store(total, tl.load(total) + others)  #@ total
    if BUG not in ("no lock", "unlocks before the store"):
        if BUG != "no barrier before the unlock":
            tl.debug_barrier()
        sem2: tl.constexpr = "relaxed" if BUG == "relaxed unlock" else "release"
        if (BUG != "one keeps the lock") | (block != 1):
            tl.atomic_add(tickets + 1, 1, sem=sem2, scope=scope)  #@ unlock
    if BUG != "reads without waiting":
        _grid_barrier(counter, BUG)
    if block == 0:
        tl.store(out_ptr, tl.load(total))  #@ read total
        tl.store(total, 0)  #@ clear total
        if BUG != "forgot the tickets":
            tl.store(tickets + tl.arange(0, 2), tl.zeros([2], tl.int32))


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


# All-reduce under a lock for every tile, as Iris has it: each rank adds its numbers to everybody's output in turn, with
# ordinary loads and stores between compare-and-swap and exchange at sys scope.


@triton.jit
def lock_sum(x_ptr, sums, locks, n, WORLD: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr):
    block = tl.program_id(0)
    scope: tl.constexpr = "gpu" if BUG == "gpu scope" else "sys"
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    for other in range(WORLD):
        lock = _words(locks, other) + block
        there = _words(sums, other) + at
        if BUG == "test and set apart":
            while tl.atomic_add(lock, 0, sem="acquire", scope=scope) != 0:
                pass
            tl.atomic_xchg(lock, 1, sem="acquire", scope=scope)
        else:
            sem: tl.constexpr = "relaxed" if BUG == "relaxed lock" else "acquire"
            while tl.atomic_cas(lock, 0, 1, sem=sem, scope=scope) != 0:  #@ tile locked
                pass
        if BUG != "no barrier after the lock":
            tl.debug_barrier()
        tl.store(there, tl.load(there, mask=mask) + x, mask=mask)  #@ tile sum
        if BUG != "no barrier before the unlock":
            tl.debug_barrier()
        if BUG == "plain unlock":
            tl.store(lock, 0)  #@ plain unlock
        elif BUG == "relaxed unlock":
            tl.atomic_xchg(lock, 0, sem="relaxed", scope=scope)
        elif (BUG != "forgot one unlock") | (other != WORLD - 1):
            tl.atomic_xchg(lock, 0, sem="release", scope=scope)  #@ tile unlocked


def lock_sums(bug: str = "", blocks: int = 2, n: int = 7) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        sums, locks = comm.symmetric((n,), INT), comm.symmetric((blocks,), INT)
        sums.local.zero_()
        comm.barrier()
        comm.launch(
            lock_sum, blocks, numbers(comm.rank, 0, n), sums.table, locks.table, n, WORLD=comm.world_size, BLOCK=4,
            BUG=bug,
        )  # fmt: skip
        comm.barrier()
        assert not locks.local.any(), "a lock is held"
        out = sums.local.clone()
        return right([out], [summed(comm.world_size, 0, n)])

    return fn


FAMILIES: dict[str, Callable[..., Callable[[Communicator], Any]]] = {
    "one_shot": one_shots,
    "push_gather": push_gathers,
    "two_shot": two_shots,
    "ring_gather": ring_gathers,
    "queue": queues,
    "grid_sum": grid_sums,
    "lock_sum": lock_sums,
}


def body(family: str, bug: str = "", **sizes: int) -> Callable[[Communicator], Any]:
    """`fn(comm)` of a family, with a name of its own."""
    fn = FAMILIES[family](bug, **sizes)
    fn.__qualname__ = f"{family} {bug}".strip()
    return fn
