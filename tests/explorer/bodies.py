"""The calls that show a mutant: generators that make `calls` calls and yield each one's result and expected result.

The explorer, which examines every access, and separate processes, which only compare results, use the same generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from tricomm.communicator import Communicator
from tricomm.explorer.world import oracle
from tricomm.kernels import reference
from tricomm.kernels.collectives import registry
from tricomm.policy.tuning_tables import TableRow

if TYPE_CHECKING:
    from tests.explorer.mutation import Mutant

Pair = tuple[torch.Tensor, torch.Tensor]


def in_turn(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    """The mutant's kernels and sizes in turn, on numbers that differ in every call, rank and element."""
    for number in range(calls):
        key = mutant.keys[number % len(mutant.keys)]
        size = mutant.sizes[number % len(mutant.sizes)]
        size *= registry.find(*key).kind.rows_in(comm.world_size)
        yield _call(comm, key, [_part(number, r, size, mutant.dtype) for r in range(comm.world_size)], number=number)


def two_blocks_by_table(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    """A tuned table requests two blocks, however many are resident."""
    ((collective, algorithm, protocol),) = mutant.keys
    comm.use_table((TableRow(collective, comm.world_size, None, algorithm, protocol, blocks=2),), "two blocks")
    yield from in_turn(comm, mutant, pads, calls)


def floats(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    """Numbers one of which is lost unless the others are added first, so another order has another sum."""
    for number in range(calls):
        values = [(1e8, 1.0, -1e8)[(r + number) % 3] for r in range(comm.world_size)]
        parts = [torch.full((mutant.sizes[number % len(mutant.sizes)],), v) for v in values]
        yield _call(comm, mutant.keys[0], parts)


def quantised(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    """Quantised calls; numbers and scales differ in every call, rank and block."""
    for number in range(calls):
        size = mutant.sizes[number % len(mutant.sizes)]
        draws = [torch.Generator().manual_seed(100 * number + r) for r in range(comm.world_size)]
        parts = [(torch.randn(size, generator=draw) * (number + 1)).to(mutant.dtype) for draw in draws]
        _, algorithm, protocol = mutant.keys[0]
        result = comm.all_reduce(parts[comm.rank].clone(), algorithm=algorithm, protocol=protocol)
        yield result, reference.quantised(registry.wire_of(algorithm), "sum", parts)


def cube_floats(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    """Numbers of the mutant's type whose sum tells in which order a quad was added, and whether it was rounded."""
    numbers = (2.0, 1e8, 0.5, -1e8, 1.0, 3.0, 5.0, 7.0)
    if mutant.dtype == torch.bfloat16:  # 257 has one bit too many for it, 258 does not
        numbers = (256.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    for number in range(calls):
        values = [numbers[(r + number) % 8] for r in range(comm.world_size)]
        parts = [torch.full((mutant.sizes[number % len(mutant.sizes)],), v).to(mutant.dtype) for v in values]
        yield _call(comm, mutant.keys[0], parts)


def differing(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    """Rank 0 calls another operation than the others, which every rank must refuse: no result is right."""
    for number in range(calls):
        parts = [_part(number, r, mutant.sizes[0], mutant.dtype) for r in range(comm.world_size)]
        yield _call(comm, mutant.keys[0], parts, "max" if comm.rank == 0 else "sum")[0], torch.empty(0)


def prefilled(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    """Fill the mailboxes of words with flags as they are when a 32-bit counter wraps around: with words of the epochs
    after the next one."""
    memory = comm._internal.group.layout
    for start, buffer in ((memory.ll, memory.ll_buffer), (memory.wide, memory.wide_buffer)):
        words = comm._group.arena.tensor(comm.rank, start, (2, comm.world_size * buffer // 8), torch.int64)
        for ahead in (3, 4):
            epoch = mutant.first_epoch + ahead
            words[epoch & 1].fill_(epoch << 32 | 77)
    comm.barrier()
    yield from in_turn(comm, mutant, pads, calls)


def around_barrier(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    """Host code writes, meets its peers in `Communicator.barrier`, reads what the next rank wrote, and meets again."""
    memory = comm.symmetric((4,), torch.int64)
    following = (comm.rank + 1) % comm.world_size
    for number in range(calls):
        memory.local.fill_(number * 100 + comm.rank)
        comm.barrier()
        got = memory.peers[following].clone()
        comm.barrier()
        yield got, torch.full((4,), number * 100 + following)


def streams(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    yield from pads.streams(comm, calls, mutant.blocks)


def groups(comm: Communicator, mutant: Mutant, pads: ModuleType, calls: int) -> Iterator[Pair]:
    yield from pads.groups(comm, calls)


def _part(number: int, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that differ in every call, rank and element; of 64 bits, in both halves: an LL word carries one."""
    numbers = torch.arange(size, dtype=dtype) * 7 + rank * 1000 + number * 100_000 + 1
    return numbers * (1 << 32 | 1) if dtype == torch.int64 else numbers


def _call(
    comm: Communicator, key: tuple[str, str, str], parts: list[torch.Tensor], op: str = "sum", number: int = 0
) -> Pair:
    """One call with the ranks' inputs `parts`; if it has a root, each rank is the root in turn."""
    kernel = registry.find(*key)
    if kernel.collective == "barrier":
        comm.barrier()
        return torch.zeros(0), torch.zeros(0)
    root = number % comm.world_size if kernel.kind.root else -1
    how = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
    how |= {kernel.kind.root: root} if kernel.kind.root else {}
    how |= {"op": op} if kernel.reduces else {}
    quads = oracle.quads(comm.topology, comm.world_size) if kernel.needs_cube else ()
    want = reference.expected(kernel.collective, op, parts, comm.rank, root, quads)
    gets = kernel.kind.root != "dst" or root == comm.rank
    if gets and kernel.collective not in ("broadcast", "reduce"):  # these calls are in place
        how["out"] = torch.full_like(want, -1)
    got = getattr(comm, kernel.collective)(parts[comm.rank].clone(), **how)
    return (got, want) if gets else (torch.zeros(0), torch.zeros(0))
