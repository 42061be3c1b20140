"""The services that a group needs: kernels, a monitor, memory, tuning tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tricomm.core.entry_guard import CallLock
from tricomm.core.symmetric import nbytes_of
from tricomm.core.topology_agreement import DeviceFacts, device_facts
from tricomm.core.watch.monitor import Monitor
from tricomm.gpu import Gpu
from tricomm.kernels.launch import kernel_launch
from tricomm.policy import user_tables
from tricomm.policy.tuning_tables import Fingerprint, TunedTable
from tricomm.store.arenas.arena import Arena
from tricomm.store.arenas.open_arena import open_arena
from tricomm.store.arenas.registered import open_registered
from tricomm.store.control import ControlPage


@dataclass(eq=False)
class Runtime:
    """The services of ranks that are processes, or streams of one; the explorer's tasks override them.

    no_symmetric   why there is no symmetric memory; None if there is
    """

    no_symmetric: str | None = None

    def gpu(self, device: torch.device) -> Gpu | None:
        """The GPU whose streams the kernels run on; None if they are interpreted."""
        return Gpu(device) if device.type == "cuda" else None

    def facts(self, device: torch.device) -> DeviceFacts:
        """The facts that the ranks exchange about the devices that their kernels run on."""
        return device_facts(device)

    prepare = staticmethod(kernel_launch.prepare)
    bind = staticmethod(kernel_launch.bind)

    def call_lock(self) -> CallLock:
        """The lock of a group's calls; not taken yet."""
        return CallLock()

    def monitor(self, control: ControlPage, timeout: float, stall_timeout: float) -> Monitor:
        """The monitor of a group; not started yet."""
        return Monitor(control, timeout, stall_timeout)

    def symmetric(
        self, control: ControlPage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, timeout: float,
        multicast: bool,
    ) -> Arena:  # fmt: skip
        """Memory for a tensor on every rank, with a multicast address if `multicast` and if possible; called by all
        ranks together."""
        return open_arena(control, nbytes_of(shape, dtype), device, timeout, multicast=multicast)

    def register(
        self, control: ControlPage, tensor: torch.Tensor, timeout: float, group: Any, no_multicast: str
    ) -> Arena:
        """The memory of every rank's own tensor, as `open_registered`; called by all ranks together."""
        return open_registered(control, tensor, timeout, group, no_multicast)

    def table(self, control: ControlPage, box: Fingerprint, timeout: float) -> TunedTable | None:
        """The user's own tuning table for this kind of box; called by all ranks together."""
        return user_tables.agree(control, box, timeout)


PROCESSES = Runtime()
