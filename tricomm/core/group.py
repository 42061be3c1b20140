"""A group of ranks: this rank's place in it, the memory that the ranks share, their lifetime, and the services that the
group needs: kernels, a monitor, tuning tables."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tricomm.core import dependent_launch, topology_agreement
from tricomm.core.bootstrap import Shared
from tricomm.core.entry_guard import CallLock
from tricomm.core.symmetric import nbytes_of
from tricomm.core.topology_agreement import DeviceFacts, device_facts
from tricomm.core.watch.monitor import Monitor
from tricomm.errors import InvalidArgument
from tricomm.gpu import Gpu
from tricomm.kernels import layout
from tricomm.kernels.launch import cuda_launcher, kernel_launch
from tricomm.kernels.launch.compiler import Compile
from tricomm.kernels.launch.kernel_launch import GroupArgument
from tricomm.metrics.counters import HeldMemory
from tricomm.metrics.flight_recorder import FlightRecorder
from tricomm.options import Options
from tricomm.policy import launch_shapes, user_tables
from tricomm.policy.tuning_tables import Fingerprint, TunedTable
from tricomm.store.arenas.arena import Arena
from tricomm.store.arenas.open_arena import open_arena
from tricomm.store.arenas.registered import open_registered
from tricomm.store.control import ControlPage, RankState
from tricomm.store.process import forks


@dataclass(eq=False)
class Runtime:
    """The services of ranks that are processes, or streams of one process; the explorer overrides them.

    no_symmetric   why there is no symmetric memory; None if there is some
    """

    no_symmetric: str | None = None

    def gpu(self, device: torch.device) -> Gpu | None:
        """The GPU whose streams the kernels run on; None if they are interpreted."""
        return Gpu(device) if device.type == "cuda" else None

    def facts(self, device: torch.device) -> DeviceFacts:
        """The facts that the ranks exchange about the devices that their kernels run on."""
        return device_facts(device)

    def recorder(self, control: ControlPage, timeout: float) -> FlightRecorder:
        """The flight recorder of a group's calls, until the ranks know their places in the job."""
        return FlightRecorder(control.group, range(control.world_size), control.rank, timeout)

    prepare = staticmethod(kernel_launch.prepare)
    bind = staticmethod(kernel_launch.bind)

    def compile(
        self,
        device: torch.device,
        by: Compile,
        kernel: Any,
        constexprs: dict[str, Any],
        bits: int | None,
        aligned: bool,
    ) -> None:
        """Make the machine code that `bind` loads for these arguments by calling `by`, if this process does not have
        it."""
        if device.type == "cuda":
            capability = cuda_launcher.torch_device(device).capability
            cuda_launcher.code_of(kernel, constexprs, bits, aligned, capability, by)

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
        """Register every rank's tensor, as `open_registered`; called by all ranks together."""
        return open_registered(control, tensor, timeout, group, no_multicast)

    def table(self, control: ControlPage, box: Fingerprint, timeout: float) -> TunedTable | None:
        """The user's tuning table for this kind of machine; called by all ranks together."""
        return user_tables.agree(control, box, timeout)


PROCESSES = Runtime()


log = logging.getLogger("tricomm")
_NO_TABLE: tuple[torch.Tensor, GroupArgument] = (torch.empty(0, device="cpu"), ())
_groups: weakref.WeakSet[Group] = weakref.WeakSet()


class Group:
    """One rank's end of a group. The constructor is collective, and takes over the contents of `shared`.

    rank, world_size   this rank's number, and the number of ranks
    name               the group's, the same on all ranks
    device, gpu        of this rank's tensors; `gpu` is None if the kernels are interpreted on a CPU
    origin             the group out of which this one was made, in words; empty for a new one
    simulated          whether the kernels are interpreted; then times say nothing about a GPU
    table              int64 tensor, the group table for users' kernels: ranks, addresses, sizes
    argument           the same for the shipped kernels: `layout.group_argument`
    routes             which backends its calls use
    recorder           records its last calls
    words, flags       the control words that the kernels and the host of this rank share; `flags` reads faster
    closed             whether it has been closed, or this process is a forked child
    suspended          whether its memory has been freed
    recovering         the lock of `shrink` and `replace`
    refusing           whether calls are refused, because it is closed or suspended
    max_blocks         the largest grid whose blocks are surely resident together on every rank's device
    handles            counts the symmetric handles that were made
    no_dependent_launch  why none of its kernels is a dependent launch; empty if some are
    owned              symmetric memory that is not closed, by the number of its handle; it ends with the group
    registered         users' tensors that all ranks reach, and their arenas, by the number of the handle; these arenas
                       also end with the group
    unregistered       why a user's memory could not be shared the last time
    """

    words: NDArray[np.int64]
    flags: memoryview
    table: torch.Tensor
    argument: GroupArgument
    device_class: str
    max_blocks: int

    def __init__(
        self, shared: Shared, device: torch.device, timeout: float, options: Options, runtime: Runtime
    ) -> None:
        control = shared.control
        self.rank, self.world_size, self.name = control.rank, control.world_size, control.group
        self.device, self.timeout, self.options, self.runtime = device, timeout, options, runtime
        self.control, self.arena, self.layout = control, shared.arena, shared.layout
        self.topology, self.routes = shared.topology or options.topology, shared.routes
        self.recorder = shared.recorder or runtime.recorder(control, timeout)
        self.origin = self.recorder.origin = shared.origin
        topology_agreement.check(options, self.world_size)
        self.gpu: Gpu | None = runtime.gpu(device)
        self.simulated = self.gpu is None
        self.pid, self.forks = os.getpid(), forks()
        self.recovering = CallLock()
        self.closed = self.suspended = self.refusing = False
        _groups.add(self)
        self.owned: dict[int, Arena] = {}
        self.handles = 0
        self.registered: dict[int, tuple[Arena, torch.Tensor]] = {}
        self.unregistered = ""
        self.reachable = all(self.arena.bases)
        self.words = control.own().device_words()
        self.flags = memoryview(self.words)  # type: ignore[arg-type]  # reads faster than an array
        self.begin()
        facts = runtime.facts(device)
        # This exchange also confirms that every rank has written its tables; no kernel may run before it.
        agreed = topology_agreement.agree_on_devices(control, facts, options.max_blocks, timeout)
        self.device_class, self.max_blocks = agreed
        self.no_dependent_launch = "no kernel runs on a GPU"
        if self.gpu is not None and self.routes.no_kernels is None:
            self.no_dependent_launch = dependent_launch.agree(control, options, facts, timeout)
        launch_shapes.check_grid(options._tuning.blocks, self.max_blocks, options.max_blocks)

    @property
    def fingerprint(self) -> Fingerprint:
        """The kind of machine on which this group runs, the key of tuning tables."""
        return user_tables.fingerprint(self.device_class, self.device, self.world_size, self.topology)

    @property
    def peer_ranges(self) -> list[tuple[int, int]]:
        """(first address, bytes) of every rank's arena as mapped in this process."""
        return [(base, self.arena.nbytes) for base in self.arena.bases]

    def captured(self, what: str) -> InvalidArgument | None:
        """The error for `what`, which allocates or frees memory, if a graph is being captured; else None."""
        if self.gpu is None or not self.gpu.capturing():
            return None
        return InvalidArgument(f"{what}: the current stream captures a CUDA graph; {what} before or after the capture")

    def begin(self) -> None:
        """Initialise zeroed memory and the control words for kernels: tables and message counters. Called at first and
        after a resume. No kernel may run before every rank has done it."""
        self.words[layout.STARTED] = 0
        self.words[layout.ENDED : layout.CONTROL_WORDS] = self.options._tuning.first_epoch
        self.table, self.argument = self._write_table() if self.routes.no_kernels is None else _NO_TABLE
        if self.gpu is not None:  # because the first kernel may run on another stream than these copies
            self.gpu.synchronize()

    def _write_table(self) -> tuple[torch.Tensor, GroupArgument]:
        """Fill the table at the head of this rank's arena, and the counters of its messages."""
        arena, memory, first_epoch = self.arena, self.layout, self.options._tuning.first_epoch
        table = arena.tensor(self.rank, 0, (layout.HEADERS // 8,), torch.int64)
        control = getattr(arena, "control_address", self.control.device_words)
        values = topology_agreement.group_table(self.rank, arena.bases, control, memory, self.topology, first_epoch)
        values[layout.MULTICAST] = arena.multicast
        table.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))
        counters = torch.tensor(
            memory.first_counters(self.options._tuning.first_epoch), dtype=torch.int64, device="cpu"
        )
        arena.tensor(self.rank, memory.queue_states, tuple(counters.shape), torch.int64).copy_(counters)
        return table, layout.group_argument(table, values, self.world_size)

    def close(self) -> None:
        """Refuse calls from now on."""
        self.closed = self.refusing = True

    def sleep(self, suspended: bool) -> None:
        """Mark the group as suspended or awake."""
        self.suspended = suspended
        self.refusing = suspended or self.closed
        for arena, _ in self.registered.values():
            arena.suspended = suspended

    def live_arenas(self) -> dict[int, Arena]:
        """The arenas that are open, by number: 0 is the group's arena, others are symmetric memory by the number of the
        handle."""
        return {0: self.arena, **self.owned}

    def memory(self) -> HeldMemory:
        """The amount of its device's memory that this rank holds."""
        live = self.live_arenas().values()
        held = 0 if self.suspended else sum(arena.nbytes for arena in live if not arena.closed)
        return HeldMemory(self.arena.kind, held, self.suspended)

    def leave_to_graphs(self, undo: ExitStack) -> None:
        """Leave the memory to the graphs that were captured over it; `undo` ends the rest.

        A graph may be replayed at any time until the process ends. The abort word stays set, so a replay ends soon,
        with an undefined output.
        """
        self.words[layout.ABORT] = 1
        undo.callback(self.control.set_state, RankState.CLOSED)
        for arena in (self.arena, *self.owned.values(), *(arena for arena, _ in self.registered.values())):
            undo.callback(arena.keep)

    def release(self, undo: ExitStack, acknowledged: bool) -> None:
        """Let `undo` free the memory, except the arena if a peer may still write an acknowledgement to it (not
        `acknowledged`)."""
        undo.callback(self.control.close)
        if acknowledged:
            undo.callback(self.arena.close)
        for arena in (*self.owned.values(), *(arena for arena, _ in self.registered.values())):
            undo.callback(arena.close)

    def drop(self, stop: Callable[[], None]) -> None:
        """Release everything after the communicator was garbage-collected without `close`, and `stop` its monitor. For
        the other ranks it has closed."""
        log.warning("%s was dropped without close()", self)
        self.close()
        with ExitStack() as undo:
            self.release(undo, acknowledged=True)
            undo.callback(stop)
            self.forget_views()

    def forget_views(self) -> None:
        """Drop the tensors and views that keep mappings alive; the words keep their values."""
        self.table, self.argument = _NO_TABLE
        self.registered.clear()
        self.words = self.words.copy()
        self.flags = memoryview(self.words)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"tricomm group {self.name}, rank {self.rank} of {self.world_size} on {self.device}"


def _after_fork() -> None:
    """Called in a forked child: marks its copies of the groups as closed, so that calls need not check the process."""
    for group in list(_groups):
        group.closed = group.refusing = True


os.register_at_fork(after_in_child=_after_fork)
