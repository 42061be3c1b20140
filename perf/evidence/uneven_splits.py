"""all_to_all_v with another length for every pair of ranks, nothing among them."""

from __future__ import annotations

import torch

from tricomm import Communicator
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf.bench import check_data

WIDTHS = (1, 37, 4097)  # elements a row


def lengths(world_size: int, number: int) -> list[list[int]]:
    """Rows that rank s sends to rank d in call number `number`: at [s][d]."""
    return [[(3 * s + 5 * d + number) % 4 for d in range(world_size)] for s in range(world_size)]


def wrong(comm: Communicator, kernel: Kernel, dtype: torch.dtype, dry_run: bool) -> list[str]:
    """Make a call of each width; what was wrong, in words."""
    found = []
    for number, width in enumerate(WIDTHS[:2] if dry_run else WIDTHS):
        rows = lengths(comm.world_size, number)
        mine = [row[comm.rank] for row in rows]
        data = [_sent(comm.world_size, source, number, rows[source], width, dtype) for source in range(comm.world_size)]
        x = torch.cat(data[comm.rank]).to(comm.device, dtype)
        y = torch.empty(sum(mine), width, dtype=dtype, device=comm.device)
        check_data.poison(y)
        comm.all_to_all_v(x, rows[comm.rank], mine, out=y, algorithm=kernel.algorithm, protocol=kernel.protocol)
        comm.synchronize()
        bad = check_data.wrong(y, torch.cat([parts[comm.rank] for parts in data]))
        found += [f"rank {comm.rank}, rows {rows} of {width} elements: {bad} elements are wrong"] if bad else []
    return found


def _sent(
    world_size: int, source: int, number: int, rows: list[int], width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """int64 [rows, width] for every rank: what rank `source` sends to it."""
    numbers = check_data.values("broadcast", "none", world_size, source, number, sum(rows) * width, dtype)
    return tuple(torch.split(numbers.view(-1, width), rows))
