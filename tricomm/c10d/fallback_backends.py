"""The backends of a group for calls that no kernel runs: TCP connections for the CPU, torch's NCCL for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from tricomm.c10d.capabilities import GroupCapabilities, GroupConfig, torch_backend
from tricomm.c10d.torch_names import c10d
from tricomm.c10d.work_handles import CombinedWork
from tricomm.metrics.counters import NCCL
from tricomm.options import Options
from tricomm.store.generation import Generation
from tricomm.store.records import Capabilities
from tricomm.store.tcp.transport import Transport

_STALL = 30.0
# With one type for two devices, torch would use the first backend for both.
_TYPES = {"cpu": c10d.ProcessGroup.BackendType.GLOO, "cuda": c10d.ProcessGroup.BackendType.NCCL}


@dataclass
class Backends:
    """The backends of one group other than the kernels, by device type.

    native      torch's own backend objects, by device type
    transport   the group's TCP connections; if they serve the CPU, there is no native backend for it
    owned       whether the backends end with the group; not if they belong to a wrapped group
    generation  the group's keys in the store, deleted with the group; None if they belong to another group
    remedy      how the ranks go on once the group is lost, in words
    """

    native: dict[str, Any]
    transport: Transport | None = None
    owned: bool = True
    generation: Generation[Capabilities] | None = None
    remedy: str = "make a new one"

    def shrinks(self) -> None:
        """The ranks share memory, over which `tricomm.shrink` works unless the group wraps another one."""
        if self.owned:
            self.remedy = "shrink it by tricomm.shrink(group), or make a new one"
            if self.transport is not None:
                self.transport.remedy = self.remedy

    @property
    def devices(self) -> list[str]:
        """The device types that the group serves."""
        own = ["cpu"] if self.transport is not None and "cpu" not in self.native else []
        return own + list(self.native)

    def register(self, group: Any) -> None:
        """Tell torch the backends of `group`, a `ProcessGroup`.

        The CPU has no backend of torch. C++ code gets the `_stand_in`, all of whose collectives raise an error.
        """
        for device in self.devices:
            native = self.native[device] if device in self.native else _stand_in(group.rank(), group.size())
            group._register_backend(torch.device(device), _TYPES[device], native)
        group._set_default_backend(_TYPES["cuda" if "cuda" in self.native else "cpu"])

    def shutdown(self) -> None:
        """If the group owns the native backends, shut them down after their calls have run; leave the store."""
        if self.owned:
            for backend in self.native.values():
                backend.shutdown()
        if self.generation is not None:
            self.generation.end()

    def abort(self) -> None:
        """Abort NCCL in the middle of its calls, if the group owns it."""
        if self.owned and "cuda" in self.native:
            self.native["cuda"].abort()

    def error(self) -> str | None:
        """Always None, for a communicator's monitor, because torch's watchdog checks NCCL for errors."""
        return None


class CallBlock:
    """A block of calls that torch coalesces. The calls in it that NCCL runs form one NCCL group, in which order does
    not matter.

    The NCCL group begins with the first call that NCCL runs, so a block without such calls has none.
    """

    def __init__(self) -> None:
        self._works: list[Any] | None = None  # handles of the block's calls so far; None outside of a block
        self._grouping: Any = None

    def begin(self) -> None:
        self._end_group()  # if an exception has left the last block
        self._works = []

    def entered(self, backend: Any) -> Any:
        """`backend`; inside of a block, its next call belongs to the block's NCCL group."""
        if self._works is not None and self._grouping is None and backend.supports_coalescing:
            backend._start_coalescing()
            self._grouping = backend
        return backend

    def add(self, work: Any) -> None:
        if self._works is not None:
            self._works.append(work)

    def end(self) -> CombinedWork:
        """One handle for all calls of the block."""
        works, self._works = self._works or [], None
        return CombinedWork([*works, self._end_group()])

    def together(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Make the calls of `run()` one block; returns their handles and one for the NCCL group. Inside of a block, the
        calls join that block."""
        if self._works is not None:
            return run()
        self.begin()
        group = None
        try:
            works = run()
        finally:
            self._works, group = None, self._end_group()
        return works if group is None else [*works, group]

    def _end_group(self) -> Any:
        backend, self._grouping = self._grouping, None
        return None if backend is None else backend._end_coalescing()


def make(
    config: GroupConfig, agreed: GroupCapabilities, options: Options | None, native: dict[str, Any] | None
) -> Backends:
    """Make the backends for every device type of this process, or use `native`, the backends of a wrapped group; called
    by all ranks together, which also connect.

    Raises `ResourceError` on all ranks if one has too few descriptors, and as `Transport` does if they do not connect.
    """
    made = Backends(native or {}, owned=native is None, generation=agreed.generation)
    if torch_backend("cpu") is not None if native is None else "cpu" in native:
        made.transport = _connect(config, agreed, options)
    if native is None and torch.cuda.is_available() and torch_backend("cuda") == NCCL:
        nccl: Any = c10d.ProcessGroupNCCL.Options()
        nccl._timeout, nccl.global_ranks_in_group, nccl.group_name = config.timeout, config.ranks, config.name
        store = PrefixStore("nccl", agreed.generation.store)
        made.native["cuda"] = c10d.ProcessGroupNCCL(store, config.rank, config.world_size, nccl)
        made.native["cuda"]._set_sequence_number_for_group()
    return made


def _connect(config: GroupConfig, agreed: GroupCapabilities, options: Options | None) -> Transport:
    stall = options.stall_timeout if options is not None else min(_STALL, config.timeout.total_seconds())
    try:
        transport = Transport(agreed.generation, f"c10d group {config.name!r}", stall)
    except BaseException as error:
        agreed.generation.give_up(error)
        raise
    agreed.generation.settle()
    return transport


def _stand_in(rank: int, world_size: int) -> Any:
    """A backend object for the CPU whose collectives all raise an error; None if this torch cannot make one.

    torch 2.14 and newer can; 2.15 asks each device's backend for the rank, the size, and whether it has hooks.
    """
    try:
        return _StandIn(rank, world_size)
    except TypeError:
        return None


class _StandIn(c10d.Backend):  # type: ignore[misc]
    def getBackendName(self) -> str:
        return "tricomm"
