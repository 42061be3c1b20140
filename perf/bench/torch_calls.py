"""How torch.distributed calls each collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tricomm.perf.bench.ground import Call, Contender, filling
from tricomm.perf.evidence.stage import Skip


def contender(call: Call, group: Any) -> Contender:
    """torch.distributed's own call; its all_reduce, broadcast and reduce know no other place than the input's."""
    y = call.empty(call.rows_out)
    x = y if call.collective in ("all_reduce", "broadcast", "reduce") else call.empty(call.rows_in)
    run = _call(call, x, y, group)
    if run is None:
        raise Skip(f"this comparison does not know how torch.distributed calls {call.collective}")
    result = y if call.gets and call.collective != "barrier" else None
    return Contender(filling(x, y), lambda: (run(), result)[1])


def _call(call: Call, x: torch.Tensor, y: torch.Tensor, group: Any) -> Callable[[], Any] | None:
    comm, root = call.ground.comm, call.root
    match call.collective:
        case "barrier":
            devices = None if comm.device.index is None else [comm.device.index]
            return lambda: dist.barrier(group, device_ids=devices)
        case "all_reduce":
            return lambda: dist.all_reduce(y, group=group)
        case "all_gather":
            all_gather = _single("all_gather_single", "all_gather_into_tensor")
            return lambda: all_gather(y, x, group=group)
        case "reduce_scatter":
            reduce_scatter = _single("reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: reduce_scatter(y, x, group=group)
        case "broadcast":
            return lambda: dist.broadcast(y, root, group=group)
        case "reduce":
            return lambda: dist.reduce(y, root, group=group)
        case "gather":
            into = list(y.chunk(call.rows_out)) if comm.rank == root else None
            return lambda: dist.gather(x, into, root, group=group)
        case "scatter":
            rows = list(x.chunk(call.rows_in)) if comm.rank == root else None
            return lambda: dist.scatter(y, rows, root, group=group)
        case "all_to_all":
            return lambda: dist.all_to_all_single(y, x, group=group)
        case "all_to_all_v":
            splits = [call.count] * call.rows_in
            return lambda: dist.all_to_all_single(y, x, splits, splits, group=group)
    return None


def _single(name: str, before: str) -> Callable[..., Any]:
    """What torch 2.13 has renamed."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, before)
    return found
