"""Calls whose result is known exactly: every kernel, type and operation, sizes that are odd and sizes of many chunks.

Used by ranks as streams of one process and by ranks as processes alike; runs on whatever device `comm` is on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tricomm import Communicator, Options
from tricomm.kernels import registry
from tricomm.kernels.registry import Kernel
from tricomm.perf import bench_data

# Elements. One, odd ones, a tile and one more or less, and (of 8 bytes) several times a mailbox of `OPTIONS`.
COUNTS = (1, 3, 517, 4095, 4096, 4097, 100_003, 1_000_001)
FEW = (1, 37)
OPTIONS = Options(timeout=60.0, arena_bytes=8 << 20)
FEW_OPTIONS = Options(timeout=60.0, arena_bytes=1 << 20, blocks=1, tile=64)


@dataclass(frozen=True)
class Call:
    """One call: elements of the input, operation, and by how many elements input and output are misaligned."""

    count: int
    op: str
    offset: int


def calls(kernel: Kernel, world_size: int, dry_run: bool) -> list[Call]:
    """What to call `kernel` with; every operation meets every size, and every second call is misaligned."""
    ops = registry.OPS if kernel.reduces else ("sum",)
    found: list[Call] = []
    for op in ops[:2] if dry_run else ops:
        for count in FEW if dry_run else COUNTS:
            found.append(Call(count, op, len(found) % 2 * (1 + len(found) % 3)))
    return found


def wrong(comm: Communicator, kernel: Kernel, dtype: torch.dtype, wanted: Iterable[Call]) -> list[str]:
    """Make the calls, one after another with other data each time; what came out wrong, in words."""
    if kernel.collective == "barrier":
        for _ in range(3):
            comm.barrier()
        return []
    found = []
    for number, call in enumerate(wanted):
        count, rows = call.count, 1 if kernel.reduces else comm.world_size
        data = bench_data.values(kernel.collective, call.op, comm.world_size, comm.rank, number, count)
        x = torch.empty(count + call.offset, dtype=dtype, device=comm.device)[call.offset :]
        x.copy_(data)
        whole = torch.empty(count * rows + 2 * call.offset + 16, dtype=dtype, device=comm.device)
        bench_data.poison(whole)
        before = whole.clone()
        out = whole[call.offset : call.offset + count * rows]
        run = getattr(comm, kernel.collective)
        how = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
        run(x, **({"op": call.op} if kernel.reduces else {}), out=out, **how)
        comm.synchronize()
        exact = bench_data.expected(kernel.collective, call.op, comm.world_size, number, count)
        bad = bench_data.wrong(out, exact)
        if bad:
            found.append(f"rank {comm.rank}, {call}: {bad} elements are wrong")
        rest = torch.cat([whole[: call.offset], whole[call.offset + count * rows :]])
        kept = torch.cat([before[: call.offset], before[call.offset + count * rows :]])
        if not torch.equal(rest.view(torch.uint8), kept.view(torch.uint8)):
            found.append(f"rank {comm.rank}, {call}: memory beside the output was written")
    return found


def options(dry_run: bool) -> Options:
    """Mailboxes that the larger calls go through several times."""
    return FEW_OPTIONS if dry_run else OPTIONS


def dtypes(dry_run: bool) -> tuple[str, ...]:
    """Names of the types that the kernels take; in a dry run one of each width."""
    return ("bfloat16", "float32", "int64") if dry_run else tuple(registry.DTYPES)
