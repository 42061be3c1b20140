"""torch's own backends, one per device, behind a group: point-to-point, C++-only paths, and what no kernel covers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from tricomm import routing
from tricomm.c10d.facts import torch_backend
from tricomm.c10d.torch_names import c10d


def make(store: Store, rank: int, world_size: int, timeout: timedelta, ranks: list[int], name: str) -> dict[str, Any]:
    """The native backend of every device type that this process has: {"cpu": gloo, "cuda": nccl}.

    All ranks of the group call it together: Gloo connects them here.
    """
    found: dict[str, Any] = {}
    if torch_backend("cpu") is not None:
        found["cpu"] = gloo(store, rank, world_size, timeout, ranks, name)
    if torch.cuda.is_available() and torch_backend("cuda") == routing.NCCL:
        options: Any = c10d.ProcessGroupNCCL.Options()
        options._timeout, options.global_ranks_in_group, options.group_name = timeout, ranks, name
        found["cuda"] = c10d.ProcessGroupNCCL(PrefixStore("nccl", store), rank, world_size, options)
        found["cuda"]._set_sequence_number_for_group()
    return found


def gloo(store: Store, rank: int, world_size: int, timeout: timedelta, ranks: list[int], name: str) -> Any:
    """One Gloo group over `store`; two over one store need a prefix each."""
    found: Any = c10d.ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, timeout=timeout)
    found.options.global_ranks_in_group = ranks
    found.options.group_name = name
    found._set_sequence_number_for_group()
    return found
