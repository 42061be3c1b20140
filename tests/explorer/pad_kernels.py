"""Kernels as a user would write them: symmetric data, and pads, which a signal sets to 1 and a wait back to 0.

The barrier of PyTorch's symmetric memory and vLLM; `mutants` adds bugs that it has had in these libraries.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tricomm.communicator import Communicator
from tricomm.kernels.primitives import pause

BLOCK = 4


@triton.jit
def meet(pads, rank, channel, WORLD_SIZE: tl.constexpr, SET: tl.constexpr, TAKE: tl.constexpr):
    """This block meets the block of the same channel on every rank. `pads`: addresses of int32 [channel][source]."""
    tl.debug_barrier()
    row = channel * WORLD_SIZE
    for step in range(1, WORLD_SIZE):
        pad = tl.load(pads + (rank + step) % WORLD_SIZE).to(tl.pointer_type(tl.int32)) + row + rank
        spins = 0
        while tl.atomic_cas(pad, 0, 1, sem=SET, scope="sys") != 0:
            spins += 1
            pause(spins)
    for step in range(1, WORLD_SIZE):
        pad = tl.load(pads + rank).to(tl.pointer_type(tl.int32)) + row + (rank + step) % WORLD_SIZE
        spins = 0
        while tl.atomic_cas(pad, 1, 0, sem=TAKE, scope="sys") != 1:
            spins += 1
            pause(spins)
    tl.debug_barrier()


@triton.jit
def add_up(x_ptr, y_ptr, data, pads, rank, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """y = sum of all ranks' x (int64): stage, meet, read all, meet again before the stage is reused."""
    channel = tl.program_id(0)
    at = channel * BLOCK + tl.arange(0, BLOCK)
    tl.store(tl.load(data + rank).to(tl.pointer_type(tl.int64)) + at, tl.load(x_ptr + at))
    meet(pads, rank, channel, WORLD_SIZE, "release", "acquire")
    total = tl.zeros([BLOCK], tl.int64)
    for r in tl.static_range(WORLD_SIZE):
        total += tl.load(tl.load(data + r).to(tl.pointer_type(tl.int64)) + at)
    tl.store(y_ptr + at, total)
    meet(pads, rank, channel, WORLD_SIZE, "acq_rel", "acq_rel")


Pair = tuple[torch.Tensor, torch.Tensor]


def streams(comm: Communicator, calls: int, count: int) -> Iterator[Pair]:
    """`count` sums at a time, as on `count` streams: one block each, with separate data and pads."""
    data = comm.symmetric((count * BLOCK,), torch.int64)
    pads = comm.symmetric((count * comm.world_size,), torch.int32)
    for number in range(calls):
        parts = [_part(number, r, count * BLOCK) for r in range(comm.world_size)]
        y = torch.full((count * BLOCK,), -1, dtype=torch.int64)
        args = (parts[comm.rank], y, data.table, pads.table, comm.rank)
        comm.launch(add_up, count, *args, WORLD_SIZE=comm.world_size, BLOCK=BLOCK)
        yield y, torch.stack(parts).sum(0)


def groups(comm: Communicator, calls: int) -> Iterator[Pair]:
    """Rank 0 has sums with rank 1 and with rank 2 in turn: two groups with separate data and pads."""
    memory, pads = [], None
    for members in ((0, 1), (0, 2)):
        data = comm.symmetric((BLOCK,), torch.int64)
        pads = comm.symmetric((2,), torch.int32)
        memory.append((members, data.table[list(members)], pads.table[list(members)]))
    for number in range(calls):
        members, data_table, pads_table = memory[number % 2]
        if comm.rank in members:
            parts = [_part(number, r, BLOCK) for r in members]
            me, y = members.index(comm.rank), torch.full((BLOCK,), -1, dtype=torch.int64)
            comm.launch(add_up, 1, parts[me], y, data_table, pads_table, me, WORLD_SIZE=2, BLOCK=BLOCK)
            yield y, torch.stack(parts).sum(0)


def _part(number: int, rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64) * 7 + rank * 1000 + number * 100_000
