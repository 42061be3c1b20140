"""A world of ranks in one process: their control pages, memory and time. It runs no threads.

Time stands still until no task can run; then it passes (`pass_time`). The monitors are those of any other group, but
without threads. They detect ranks that are dead, stopped or late.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from tricomm.communicator import Communicator
from tricomm.core.entry_guard import CallLock
from tricomm.core.group import Runtime
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.core.symmetric import nbytes_of
from tricomm.core.watch.monitor import Monitor
from tricomm.core.watch.watcher import Watchable, Watcher
from tricomm.errors import InvalidArgument
from tricomm.explorer.memory_model import source_lines
from tricomm.explorer.memory_model.regions import Memory, Region, span_of, tensors_in
from tricomm.explorer.memory_model.source_lines import Site
from tricomm.explorer.world.task_lock import TaskLock
from tricomm.kernels import layout
from tricomm.kernels.launch import interpreter, kernel_launch
from tricomm.metrics.flight_recorder import FlightRecorder, off
from tricomm.options import Options
from tricomm.policy.tuning_tables import Fingerprint
from tricomm.store import page, process
from tricomm.store.arenas.arena import Arena
from tricomm.store.arenas.local_arena import LocalArena, LocalGroup, host_page_address
from tricomm.store.control import ControlPage, Host, PackedDescriptor, RankSegment, RankState
from tricomm.store.records import ExchangeMessage

CPU = torch.device("cpu")
_KEPT_BYTES = 1 << 28  # bytes of closed handles that stay mapped
_MULTICAST, _APART = 1 << 60, 1 << 46  # addresses that are unused in this process


class Turns(Protocol):
    """The functions of the scheduler that a rank's host code needs."""

    def wait(self, rank: int) -> None: ...

    def give_way(self, rank: int) -> None: ...

    def wake_hosts(self) -> None: ...

    def refuse_strangers(self, rank: int) -> None: ...

    def in_host(self) -> int | None: ...


class World:
    """The state that the ranks of one execution share.

    `run(rank, blocks, private)` runs a launch to its end. `planned(rank, request, plan)` returns the plan that is kept
    for calls of `request`. `runtime(world, rank)` makes a rank's runtime. By default it interprets kernels.
    """

    def __init__(
        self,
        world_size: int,
        options: Options,
        memory: Memory,
        turns: Turns,
        run: Callable[[int, list[interpreter.Program], list[Region]], None],
        met: Callable[[int, int, bool], None] = lambda rank, step, after: None,
        planned: Callable[[int, Request, LaunchPlan], LaunchPlan] = lambda rank, request, plan: plan,
        runtime: Callable[[World, int], Runtime] | None = None,
    ) -> None:
        self.world_size, self.options, self.memory = world_size, options, memory
        self.turns, self.run, self.met, self.planned = turns, run, met, planned
        self._runtime = runtime or RankRuntime
        self.now = 0.0
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.left: dict[int, Site] = {}  # where a rank's host code has closed the communicator
        self.plan = layout.plan(world_size, options.arena_bytes)
        self.monitors: dict[int, Watchable] = {}
        self._opened: dict[int, list[SimulatedHandle]] = {}
        self._closed: list[tuple[list[Region], object]] = []
        self._made = [0] * world_size
        self._pages = mmap.mmap(-1, page.NBYTES * world_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = host_page_address(self._pages)
        segments = [
            _Segment(memoryview(self._pages)[r * page.NBYTES :][: page.NBYTES], address + r * page.NBYTES)
            for r in range(world_size)
        ]
        nonce = hashlib.blake2s(repr((world_size, options)).encode(), digest_size=16).digest()
        started = process.start_time(os.getpid()) or 0
        members = [RankSegment(segment, os.getpid(), started) for segment in segments]  # type: ignore[arg-type]
        for rank, segment in enumerate(segments):
            page.Page(segment.buffer, segment.address).identify(rank, world_size, nonce, os.getpid(), started)
        self.controls = [SimulatedControl(rank, nonce, members, self) for rank in range(world_size)]
        for rank, control in enumerate(self.controls):
            control.set_state(RankState.READY)
            words = Region("control", rank, control.device_words, page.PAGE_BYTES, f"rank {rank}'s control words")
            self.memory.add(words)
        self._group = LocalGroup(world_size, CPU, pages=[control.host_words for control in self.controls])
        self.arenas = self._group.open(self.plan.nbytes)
        self._multicast(self.arenas, self.plan.nbytes)
        for rank, base in enumerate(self.arenas[0].bases):
            name = f"rank {rank}'s arena"
            self.memory.add(Region("arena", rank, base, self.plan.nbytes, name, self.plan))

    def join(self, rank: int) -> Communicator:
        """Called in a rank's host code: make its communicator."""
        comm = Communicator._over(
            self.controls[rank],
            self.arenas[rank],
            self.plan,
            CPU,
            self.options.timeout,
            self.options,
            self._runtime(self, rank),
        )
        comm._internal.planner.observer = partial(self.planned, rank)
        return comm

    def symmetric(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, multicast: bool) -> SimulatedHandle:
        """Called in a rank's host code: the rank's part of symmetric memory, for which all ranks ask in the same
        order."""
        number = self._made[rank]
        self._made[rank] += 1
        if number not in self._opened:
            exact, regions = max(1, int(np.prod(shape)) * dtype.itemsize), list[Region]()
            arenas = [SimulatedHandle(a, self, regions) for a in self._group.open(nbytes_of(shape, dtype))]
            self._opened[number] = arenas
            for owner, base in enumerate(arenas[0].bases):
                name = f"rank {owner}'s symmetric memory {number} ({dtype} {list(shape)})".replace("torch.", "")
                regions.append(Region("symmetric", owner, base, exact, name))
                self.memory.add(regions[-1])
            if multicast:
                self._multicast(arenas, exact)
        return self._opened[number][rank]

    def closed(self, rank: int, regions: list[Region], blocks: object) -> None:
        """`rank` has closed a handle. Memory that all ranks have closed stays mapped for a while, so that no new memory
        gets its addresses, and an access to it is detected."""
        for region in regions:
            region.closed[rank] = source_lines.of_host().where
        if len(regions[0].closed) == self.world_size:
            self._closed.append((regions, blocks))
        while sum(region.nbytes for regions, _ in self._closed for region in regions) > _KEPT_BYTES:
            for region in self._closed.pop(0)[0]:
                self.memory.remove(region.base)

    def _multicast(self, arenas: Sequence[LocalArena], nbytes: int) -> None:
        """Give the memory of all ranks, `nbytes` each, one multicast address."""
        address = _MULTICAST + len(self.memory.multicast) * _APART
        self.memory.multicast.append((address, nbytes, arenas[0].bases))
        for arena in arenas:
            arena.multicast = address

    def close(self) -> None:
        """Free all memory of the world."""
        for arena in self.arenas:
            arena.close()
        self._opened.clear()
        self._closed.clear()

    def leaving(self, rank: int) -> bool:
        """True if kernels of the rank have been aborted."""
        return any(self.memory.abort_words(rank))

    def pass_time(self) -> bool:
        """Let time pass until a rank's monitor detects a fault; False if none does."""
        before = [m.fault for m in self.monitors.values()]
        options = self.options
        for seconds in (0.0, 1e-3, 2.0, options.stall_timeout + 1, options.timeout + 1, 0.0, 0.0):
            self.now += seconds
            living = [r for r in self.monitors if r not in self.dead | self.stopped]
            watching = [self.monitors[rank] for rank in living if not self.monitors[rank].stopped]
            for monitor in watching:
                monitor.beat()
            for monitor in watching:
                monitor.look(seconds)
            if [m.fault for m in self.monitors.values()] != before:
                return True
        return False


class SimulatedHandle(LocalArena):
    """A rank's handle of symmetric memory. `close` waits for the rank's kernels, as on a GPU, and tells the world."""

    def __init__(self, arena: LocalArena, world: World, regions: list[Region]) -> None:
        assert arena._blocks is not None
        super().__init__(arena.rank, arena.nbytes, arena._blocks)
        self._world, self.regions = world, regions
        self.drain: Callable[[], None] = lambda: None

    def close(self) -> None:
        self._world.turns.refuse_strangers(self.rank)
        blocks, self._blocks = self._blocks, None
        if blocks is not None:
            try:
                self.drain()
            finally:
                self._world.closed(self.rank, self.regions, blocks)


class _Segment:
    """Memory that stands for a rank's control segment."""

    def __init__(self, buffer: memoryview, address: int) -> None:
        self.buffer, self.address = buffer, address

    def close(self) -> None:
        pass


class _Alive:
    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def alive(self) -> bool:
        return self._rank not in self._world.dead

    def stopped(self) -> bool:
        return False  # the stall limit decides, in the world's time, not the state of the process

    def close(self) -> None:
        pass


class _Host(Host):
    """How a rank's control page waits and tells time: while it waits, other ranks run, and time is the world's."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def watch(self, rank: int, member: RankSegment) -> Any:
        return _Alive(self._world, rank)

    def monotonic(self) -> float:
        return self._world.now

    def sleep(self, seconds: float, /) -> None:
        self._world.turns.wait(self._rank)

    def changed(self) -> None:
        self._world.turns.wake_hosts()


class SimulatedControl(ControlPage):
    """A control page that reports calls and exchanges to the explorer."""

    def __init__(self, rank: int, nonce: bytes, members: Sequence[RankSegment], world: World) -> None:
        self._world = world
        super().__init__(rank, nonce, members, _Host(world, rank))

    def announcer(self) -> Callable[[int, PackedDescriptor], None]:
        announce = super().announcer()

        def announced(sequence: int, packed: PackedDescriptor) -> None:
            announce(sequence, packed)
            self._world.turns.wake_hosts()

        return announced

    def close(self) -> None:
        if self._world.turns.in_host() == self.rank:
            self._world.left.setdefault(self.rank, source_lines.of_host())
        super().close()

    def _gather(self, slots: page.Slots, mine: ExchangeMessage, timeout: float, abort_on_fault: bool) -> list[bytes]:
        self._world.met(self.rank, mine.step, False)
        answers = super()._gather(slots, mine, timeout, abort_on_fault)
        self._world.met(self.rank, mine.step, True)
        return answers


class RankWatcher(Watcher):
    """Watches over a rank's group, without a thread: the world calls it when time passes."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def add(self, monitor: Watchable) -> None:
        self._world.monitors[self._rank] = monitor

    def discard(self, monitor: Watchable) -> None:
        monitor.stopped = True


class RankRuntime(Runtime):
    """The runtime of one rank of a world."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def gpu(self, device: torch.device) -> None:
        """None: the kernels are interpreted."""

    def prepare(
        self, kernel: Any, grid: Any, args: Sequence[Any], constexprs: dict[str, Any], device: torch.device,
        timeout: float = 600.0, interrupt: Callable[[], None] | None = None,
    ) -> Callable[[], None]:  # fmt: skip
        blocks = kernel_launch.programs(kernel, grid, args, constexprs)
        private = [_region(self._rank, tensor) for tensor in tensors_in(args) if tensor.numel()]
        return lambda: self._world.run(self._rank, blocks, private)

    def bind(
        self, kernel: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, aligned: bool,
        more: Sequence[int | torch.Tensor], group: kernel_launch.GroupArgument, timeout: float = 600.0,
    ) -> kernel_launch.BoundKernel:  # fmt: skip
        def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: kernel_launch.Rows = ()) -> None:
            args = kernel_launch.arguments(x, y, bits, group, count, call, rows, more)
            self.prepare(kernel, blocks, args, constexprs, group[0].device, timeout)()

        return run

    def recorder(self, control: ControlPage, timeout: float) -> FlightRecorder:
        return off()

    def call_lock(self) -> CallLock:
        return CallLock(TaskLock(self._world.turns, self._rank))

    def monitor(self, control: ControlPage, timeout: float, stall_timeout: float) -> Monitor:
        return Monitor(control, timeout, stall_timeout, RankWatcher(self._world, self._rank))

    def symmetric(
        self,
        control: ControlPage,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        timeout: float,
        multicast: bool,
    ) -> SimulatedHandle:
        return self._world.symmetric(self._rank, shape, dtype, multicast)

    def register(
        self, control: ControlPage, tensor: torch.Tensor, timeout: float, group: object, no_multicast: str
    ) -> Arena:
        raise InvalidArgument("register: the ranks of a simulation share memory of their own; use comm.symmetric()")

    def table(self, control: ControlPage, box: Fingerprint, timeout: float) -> None:
        """None: an execution must not depend on a tuning table of this machine."""


def _region(rank: int, tensor: torch.Tensor) -> Region:
    """The range of bytes that contains a tensor's elements."""
    low, high = span_of(tensor)
    name = f"rank {rank}'s tensor ({tensor.dtype} {list(tensor.shape)})".replace("torch.", "")
    return Region("private", rank, low, high - low, name)
