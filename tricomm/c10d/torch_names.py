"""torch's c10d classes, seen through `Any`: their stubs are not complete, and differ between versions."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d

c10d: Any = _distributed_c10d


class AnsweringGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A group that answers what torch's `ProcessGroup` reads from its backends' objects, of which the CPU has none."""

    __slots__ = ("__dict__",)

    # Of the backend object for the CPU, which is the group itself.
    supports_coalescing = supports_splitting = supports_shrinking = supports_time_estimate = False

    def __init__(self, rank: int, world_size: int, name: str) -> None:
        super().__init__(rank, world_size)
        self._name, self._desc = name, ""

    def getBackendName(self) -> str:
        return "tricomm"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, text: str) -> None:
        self._desc = text

    def _has_hooks(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False
