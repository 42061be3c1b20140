"""Any collective as its method is called: with an output, an operation and a root, or without."""

from __future__ import annotations

import math
from typing import Any

import torch

from tricomm import Communicator, Symmetric
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf.bench import check_data


def in_place(collective: str, kernel: Kernel | None = None) -> bool:
    """True for what is called without an output of its own."""
    if kernel is not None and kernel.zero_copy:
        return kernel.algorithm == "two_shot"
    return check_data.in_place(collective)


def tensors(
    comm: Communicator, collective: str, count: int, dtype: torch.dtype, kernel: Kernel | None = None
) -> tuple[torch.Tensor | Symmetric, torch.Tensor]:
    """Input and output of zeros, `count` elements a row; one and the same where there is no other place.

    The input is a symmetric handle where `kernel` reads one; that is made by all ranks together.
    """
    kind = COLLECTIVES[collective]
    number = count * kind.rows_in(comm.world_size)
    x: torch.Tensor | Symmetric = (
        comm.symmetric((number,), dtype)
        if kernel is not None and kernel.zero_copy
        else torch.zeros(number, dtype=dtype, device=comm.device)
    )
    if in_place(collective, kernel):
        return x, local(x)
    return x, torch.zeros(count * kind.rows_out(comm.world_size), dtype=dtype, device=comm.device)


def local(x: torch.Tensor | Symmetric) -> torch.Tensor:
    """This rank's tensor."""
    return x.local if isinstance(x, Symmetric) else x


def call(
    comm: Communicator, collective: str, number: int, x: torch.Tensor | Symmetric, y: torch.Tensor,
    kernel: Kernel | None = None, op: str = "sum",
) -> torch.Tensor | None:  # fmt: skip
    """Make a call, by `kernel` where one is forced, and don't wait for it; the root is that of call number `number`.

    Returns what this rank gets: `y`, or None.
    """
    if collective == "barrier":
        comm.barrier(async_op=True)
        return None
    gets = check_data.gets(collective, comm.world_size, comm.rank, number)
    count = math.prod(x.shape) // COLLECTIVES[collective].rows_in(comm.world_size)
    how: dict[str, Any] = check_data.options(collective, op, comm.world_size, number, count)
    if gets and not in_place(collective, kernel):
        how["out"] = y
    if kernel is not None:
        how |= {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
    result: torch.Tensor | Symmetric | None = getattr(comm, collective)(x, **how)
    return None if result is None else local(result)
