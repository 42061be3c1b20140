"""torch's c10d classes, typed as `Any`, because their stubs are incomplete and differ between versions."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d

c10d: Any = _distributed_c10d


class AnsweringGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A group that has the attributes that torch's `ProcessGroup` reads from backend objects, which the CPU lacks."""

    __slots__ = ("__dict__",)

    # Attributes of the backend object for the CPU, which is the group itself.
    supports_coalescing = supports_splitting = supports_time_estimate = False
    supports_shrinking = True  # by `dist.shrink_group` (`tricomm.torch_backend`)
    use_pg_for_symm_mem_rendezvous = False

    def __init__(self, config: Any) -> None:
        super().__init__(config.rank, config.world_size)
        self._config = config
        self._name, self._desc = str(config.name), ""
        self.options = c10d.Backend.Options("tricomm", config.timeout)
        self.options.global_ranks_in_group, self.options.group_name = config.ranks, config.name

    def get_group_store(self) -> Any:
        return self._config.store

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: the number begins at 0 on every rank."""

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Nothing to do: the connections are made with the group."""

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
