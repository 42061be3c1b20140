"""Any collective as its method is called: with an output, an operation and a root, or without."""

from __future__ import annotations

from typing import Any

import torch

from tricomm import Communicator
from tricomm.kernels.collectives import COLLECTIVES
from tricomm.kernels.registry import Kernel
from tricomm.perf import bench_data


def tensors(comm: Communicator, collective: str, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of zeros, `count` elements a row; one and the same where there is no other place."""
    kind = COLLECTIVES[collective]
    x = torch.zeros(count * kind.rows_in(comm.world_size), dtype=dtype, device=comm.device)
    if bench_data.in_place(collective):
        return x, x
    return x, torch.zeros(count * kind.rows_out(comm.world_size), dtype=dtype, device=comm.device)


def call(
    comm: Communicator, collective: str, number: int, x: torch.Tensor, y: torch.Tensor, kernel: Kernel | None = None,
    op: str = "sum",
) -> torch.Tensor | None:  # fmt: skip
    """Make a call, by `kernel` where one is forced, and don't wait for it; the root is that of call number `number`.

    Returns what this rank gets: `y`, or None.
    """
    if collective == "barrier":
        comm.barrier(async_op=True)
        return None
    gets = bench_data.gets(collective, comm.world_size, comm.rank, number)
    count = x.numel() // COLLECTIVES[collective].rows_in(comm.world_size)
    how: dict[str, Any] = bench_data.options(collective, op, comm.world_size, number, count)
    if gets and not bench_data.in_place(collective):
        how["out"] = y
    if kernel is not None:
        how |= {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
    result: torch.Tensor | None = getattr(comm, collective)(x, **how)
    return result
