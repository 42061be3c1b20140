"""What `tricomm check` runs for the shipped kernels: a few calls of changing size, integers, compared exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tricomm.communicator import Communicator
from tricomm.errors import InvalidArgument
from tricomm.explorer.campaign import smallest
from tricomm.explorer.compiled.compiled_runtime import checked_options
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.options import Options

# In 64-bit words, and of a shard where there are shards: so that with two blocks the second has words in every other
# call, and that there are full tiles, a part of one, and none.
SIZES = (36, 1, 40)
BLOCKS, TILE = 2, 16
# The same for compiled kernels, whose tiles have 512 words.
COMPILED_SIZES = (1028, 1, 1032)


def body(kernel: Kernel, sizes: Sequence[int] = SIZES) -> Callable[[Communicator], list[torch.Tensor]]:
    """`fn(comm)` that calls `kernel` once a size, on numbers that differ in every call, rank and element."""

    def fn(comm: Communicator) -> list[torch.Tensor]:
        return [
            result for number, size in enumerate(sizes) if (result := _call(comm, kernel, number, size)) is not None
        ]

    fn.__qualname__ = kernel.name
    fn.subject = {"kernel": kernel.name, "sizes": list(sizes)}  # type: ignore[attr-defined]
    return fn


def kernels(collective: str | None, algorithm: str | None, protocol: str | None) -> list[Kernel]:
    """Those of the shipped kernels that fit; None or "all" fits all. Raises `InvalidArgument` where none does."""
    wanted = {"collective": collective, "algorithm": algorithm, "protocol": protocol}
    wanted = {name: value for name, value in wanted.items() if value not in (None, "all")}
    known = [*registry.KERNELS, *(k for k in registry.MESSAGES if k.collective == "send")]  # with its recv
    found = [k for k in known if all(getattr(k, n) in str(v).split(",") for n, v in wanted.items())]
    if not found:
        names = ", ".join(f"{k.collective}/{k.algorithm}/{k.protocol}" for k in known)
        raise InvalidArgument(f"no shipped kernel is {wanted}; there is {names}")
    return found


def options(world_size: int, blocks: int = BLOCKS, tile: int = TILE, compiled: str | None = None) -> Options:
    """The smallest memory, and blocks and tiles so small that every path is taken."""
    if compiled is not None:
        return replace(checked_options(world_size, None), blocks=blocks)
    nbytes = smallest(world_size).arena_bytes
    return Options(arena_bytes=nbytes, blocks=blocks, tile=tile)


def _call(comm: Communicator, kernel: Kernel, number: int, size: int) -> Any:
    if kernel.collective == "barrier":
        return comm.barrier()
    if kernel.pairwise:
        return _handed_on(comm, kernel.protocol, number, size)
    kind, shards = kernel.kind, 1 if kernel.shards is None else kernel.shards or comm.world_size
    count = size * shards
    x = _numbers(number, comm.rank, count * kind.rows_in(comm.world_size))
    how: dict[str, Any] = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
    if kind.root:
        how[kind.root] = number % comm.world_size
    if kernel.collective == "all_to_all_v":
        return _uneven(comm, x, count, number, how)
    if kernel.collective not in ("broadcast", "reduce") and (kind.root != "dst" or how["dst"] == comm.rank):
        how["out"] = torch.full((count * kind.rows_out(comm.world_size),), -1, dtype=torch.int64)
    return getattr(comm, kernel.collective)(x, **how)


def _uneven(comm: Communicator, x: torch.Tensor, count: int, number: int, how: dict[str, Any]) -> Any:
    """Rows of 0 to `count` elements, by sender, receiver and call."""
    ranks, me = range(comm.world_size), comm.rank
    length = [[(count * (a + 2 * b + number)) % (count + 1) for b in ranks] for a in ranks]
    into, out = length[me], [length[r][me] for r in ranks]
    y = torch.full((sum(out),), -1, dtype=torch.int64)
    comm.all_to_all_v(x[: sum(into)], into, out, y, **how)
    firsts = [sum(row[:me]) for row in length]
    want = torch.cat([_numbers(number, r, len(x))[firsts[r] :][: out[r]] for r in ranks])
    if not torch.equal(y, want):  # the oracle sees no uneven calls
        raise AssertionError(f"all_to_all_v gave {y.tolist()} instead of {want.tolist()}")
    return y


def _handed_on(comm: Communicator, protocol: str, number: int, size: int) -> Any:
    """Two messages from each rank to the next one: a word, and then `size` of them, which are taken first.

    Nothing comes back but acknowledgements, so the first rank runs ahead as far as they let it.
    """
    results: list[torch.Tensor] = []
    if comm.rank:
        results = [torch.full((count,), -1, dtype=torch.int64) for count in (1, size)]
        for tag in (1, 0):
            comm.recv(results[tag], comm.rank - 1, tag, protocol=protocol)
            want = _numbers(number, comm.rank - 1, len(results[tag])) + tag
            if not torch.equal(results[tag], want):  # the oracle sees no messages
                raise AssertionError(f"recv gave {results[tag].tolist()} instead of {want.tolist()}")
    if comm.rank < comm.world_size - 1:
        for tag, count in enumerate((1, size)):
            comm.send(_numbers(number, comm.rank, count) + tag, comm.rank + 1, tag, protocol=protocol)
    return torch.cat(results) if results else None


def _numbers(number: int, rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64) * 7 + rank * 1000 + number * 100_000
