"""Makes the call of a collective by name: tricomm's method of that name, or torch.distributed's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tricomm import Communicator, Symmetric
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf.bench import check_data
from tricomm.perf.bench.request import Case

TORCH_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # torch.distributed has only in-place calls for them


class Unavailable(Exception):
    """A library or this machine cannot make the call; the text names the reason."""


def in_place(collective: str, kernel: Kernel | None = None) -> bool:
    """True if the result of the call replaces its input."""
    if kernel is not None and kernel.zero_copy:
        return kernel.in_place
    return check_data.in_place(collective)


def tensors(
    comm: Communicator, collective: str, count: int, dtype: torch.dtype, kernel: Kernel | None = None
) -> tuple[torch.Tensor | Symmetric, torch.Tensor]:
    """Input and output of zeros, `count` elements a row; the same tensor if the call is in place.

    The input is a symmetric handle if `kernel` reads one; all ranks make it together.
    """
    spec = COLLECTIVES[collective]
    number = count * spec.rows_in(comm.world_size)
    x: torch.Tensor | Symmetric = (
        comm.symmetric((number,), dtype)
        if kernel is not None and kernel.zero_copy
        else torch.zeros(number, dtype=dtype, device=comm.device)
    )
    if in_place(collective, kernel):
        return x, local(x)
    return x, torch.zeros(count * spec.rows_out(comm.world_size), dtype=dtype, device=comm.device)


def local(x: torch.Tensor | Symmetric) -> torch.Tensor:
    """This rank's tensor."""
    return x.local if isinstance(x, Symmetric) else x


def call(
    comm: Communicator,
    collective: str,
    number: int,
    x: torch.Tensor | Symmetric,
    y: torch.Tensor,
    forced: Kernel | Case | None = None,
    op: str = "sum",
) -> torch.Tensor | None:
    """Make a call without waiting for it, by the kernel `forced` if that is given.

    The root is that of call number `number` (see `check_data`). Returns this rank's result: `y`, or None.
    """
    if collective == "barrier":
        comm.barrier(async_op=True)
        return None
    count = math.prod(x.shape) // COLLECTIVES[collective].rows_in(comm.world_size)
    arguments: dict[str, Any] = check_data.options(collective, op, comm.world_size, number, count)
    reduced_in_handle = isinstance(x, Symmetric) and isinstance(forced, Kernel) and forced.in_place
    gets = check_data.gets(collective, comm.world_size, comm.rank, number)
    if gets and not check_data.in_place(collective) and not reduced_in_handle:
        arguments["out"] = y
    if forced is not None:
        arguments |= {"algorithm": forced.algorithm, "protocol": forced.protocol}
    result: torch.Tensor | Symmetric | None = getattr(comm, collective)(x, **arguments)
    return None if result is None else local(result)


def torch_call(
    comm: Communicator, collective: str, root: int, x: torch.Tensor, y: torch.Tensor, group: Any
) -> Callable[[], Any]:
    """torch.distributed's call of the same ranks in `group`, from `x` to `y`, with rows of equal length.

    For `TORCH_IN_PLACE`, `x` and `y` are the same tensor. Raises `Unavailable` if torch does not have it.
    """
    world_size, is_root = comm.world_size, comm.rank == root
    match collective:
        case "barrier":
            devices = None if comm.device.index is None else [comm.device.index]
            return lambda: dist.barrier(group, device_ids=devices)
        case "all_reduce":
            return lambda: dist.all_reduce(y, group=group)
        case "all_gather":
            all_gather = _renamed("all_gather_single", "all_gather_into_tensor")
            return lambda: all_gather(y, x, group=group)
        case "reduce_scatter":
            reduce_scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: reduce_scatter(y, x, group=group)
        case "broadcast":
            return lambda: dist.broadcast(y, root, group=group)
        case "reduce":
            return lambda: dist.reduce(y, root, group=group)
        case "gather":
            rows_out = list(y.chunk(world_size)) if is_root else None
            return lambda: dist.gather(x, rows_out, root, group=group)
        case "scatter":
            rows_in = list(x.chunk(world_size)) if is_root else None
            return lambda: dist.scatter(y, rows_in, root, group=group)
        case "all_to_all":
            return lambda: dist.all_to_all_single(y, x, group=group)
        case "all_to_all_v":
            splits = [len(x) // world_size] * world_size
            return lambda: dist.all_to_all_single(y, x, splits, splits, group=group)
    raise Unavailable(f"this comparison does not know how torch.distributed calls {collective}")


def _renamed(name: str, before: str) -> Callable[..., Any]:
    """A function that torch 2.13 has renamed."""
    function: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, before)
    return function
