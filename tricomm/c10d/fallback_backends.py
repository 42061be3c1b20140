"""What stands behind a group, by device: connections for the CPU, torch's own NCCL for CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from tricomm.c10d.capabilities import Member, torch_backend
from tricomm.c10d.gloo_transport import Transport
from tricomm.c10d.torch_names import c10d
from tricomm.options import Options
from tricomm.policy import backend_choice

_STALL = 30.0


class CpuBackend:
    """What torch is told stands behind a group on the CPU, and gets from `_get_backend`: the group itself.

    C++ has no backend that works: a `ProcessGroupGloo` that runs collectives needs threads of its own, and in one
    without threads they never end. A collective of the `stand_in` that C++ asks is refused by torch, with an error.
    """

    supports_coalescing = supports_splitting = supports_shrinking = supports_time_estimate = False

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.group: Any = lambda: None

    def serves(self, group: Any) -> None:
        """By the group, when it is made: what is asked of this backend is asked of `group`."""
        self.group = weakref.ref(group)

    def name(self) -> str:
        return "tricomm"

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def shutdown(self) -> None:
        self.transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group(), name)


def stand_in(rank: int, world_size: int) -> Any:
    """A backend object for the CPU whose every collective is an error; None if this torch's cannot be made.

    From 2.15 on, torch asks the object of each device for the rank, the size, and whether it has hooks.
    """
    try:
        return _StandIn(rank, world_size)
    except TypeError:
        return None


class _StandIn(c10d.Backend):  # type: ignore[misc]
    def getBackendName(self) -> str:
        return "tricomm"


def make(
    store: Store, rank: int, world_size: int, timeout: timedelta, ranks: list[int], name: str,
    members: Sequence[Member], options: Options | None,
) -> dict[str, Any]:  # fmt: skip
    """What serves every device type that this process has. All ranks of the group call it together, and connect.

    Raises `ResourceError` on all ranks if one of them has too few descriptors; `RendezvousError` without a connection.
    """
    found: dict[str, Any] = {}
    if torch_backend("cpu") is not None:
        found["cpu"] = CpuBackend(connected(store, rank, world_size, timeout, name, members, options))
    if torch.cuda.is_available() and torch_backend("cuda") == backend_choice.NCCL:
        nccl: Any = c10d.ProcessGroupNCCL.Options()
        nccl._timeout, nccl.global_ranks_in_group, nccl.group_name = timeout, ranks, name
        found["cuda"] = c10d.ProcessGroupNCCL(PrefixStore("nccl", store), rank, world_size, nccl)
        found["cuda"]._set_sequence_number_for_group()
    return found


def connected(
    store: Store, rank: int, world_size: int, timeout: timedelta, name: str, members: Sequence[Member],
    options: Options | None,
) -> Transport:  # fmt: skip
    """The connections of a group; all its ranks call it together. Raises as `make` does."""
    stall = options.stall_timeout if options is not None else min(_STALL, timeout.total_seconds())
    what = f"c10d group {name!r}"
    return Transport(PrefixStore("cpu", store), rank, world_size, members, what, stall, timeout)
