"""The `torch.distributed` backend "tricomm": drop-in for every c10d call, which falls back to NCCL and Gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from tricomm.c10d import custom_ops
from tricomm.c10d.call_futures import collect_all
from tricomm.c10d.capabilities import GroupConfig
from tricomm.c10d.group_creation import create, ddp_hook, make, wrap
from tricomm.c10d.process_group import TricommGroup
from tricomm.options import Options

__all__ = ["TricommGroup", "custom_ops", "ddp_hook", "group_over", "register", "wrap"]


def register() -> None:
    """Register "tricomm" for `dist.init_process_group`; idempotent. The entry point of torch >= 2.14 calls it too."""
    if hasattr(dist.Backend, "TRICOMM"):
        return
    torch._C._collect_all = collect_all  # `torch.futures.collect_all` would lose the places of callbacks
    dist.Backend.register_backend("tricomm", create, extended_api=True, devices=["cpu", "cuda"])
    both: Any = dist, distributed_c10d
    both[0].batch_isend_irecv = both[1].batch_isend_irecv = _together(dist.batch_isend_irecv)


def _together(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """`run`, torch's `batch_isend_irecv`, which lets NCCL run the messages of a batch together only if the group is no
    subclass of `ProcessGroup`. Ungrouped, ranks that all send before they receive wait for each other for ever."""

    @functools.wraps(run)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        ops = p2p_op_list if isinstance(p2p_op_list, list) else []
        groups = {(op.group or dist.group.WORLD) if isinstance(op, dist.P2POp) else None for op in ops}
        group = groups.pop() if len(groups) == 1 else None  # torch refuses messages of several groups
        return group.batch(ops, run) if isinstance(group, TricommGroup) else run(p2p_op_list)

    return batch_isend_irecv


def group_over(
    store: Any, rank: int, world_size: int, timeout: timedelta, options: Options | None = None, name: str = "tricomm"
) -> TricommGroup:
    """A standalone group over any Store, outside this job's default group: for ranks of several jobs.

    Every member calls it, with a store (or a `PrefixStore`) that no other group uses. `shutdown()` ends it.
    """
    config = GroupConfig(PrefixStore("tricomm", store), rank, world_size, timeout, list(range(world_size)), name)
    return make(config, options)
