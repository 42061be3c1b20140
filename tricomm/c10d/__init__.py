"""The `torch.distributed` backend "tricomm": supports every c10d call, some of them by NCCL or over TCP."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from tricomm.c10d import custom_ops
from tricomm.c10d.call_futures import collect_all
from tricomm.c10d.capabilities import GroupConfig
from tricomm.c10d.group_creation import ddp_hook, make, wrap
from tricomm.c10d.process_group import TricommGroup
from tricomm.options import Options

__all__ = ["TricommGroup", "custom_ops", "ddp_hook", "group_over", "wrap"]

torch._C._collect_all = collect_all  # `torch.futures.collect_all` knows no places of callbacks


def group_over(
    store: Any, rank: int, world_size: int, timeout: timedelta, options: Options | None = None, name: str = "tricomm"
) -> TricommGroup:
    """A standalone group over any Store, outside this job's default group: for ranks of several jobs.

    Every member calls it, with a store (or a `PrefixStore`) that no other group uses. `shutdown()` ends it.
    """
    config = GroupConfig(PrefixStore("tricomm", store), rank, world_size, timeout, list(range(world_size)), name)
    return make(config, options)
