"""A simulated rank whose kernels take the launch path of a GPU: compiled, packed, launched on a stream, executed by the
PTX machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tricomm.core.topology_agreement import DeviceFacts
from tricomm.errors import InvalidArgument
from tricomm.explorer.compiled import torch_cuda, user_launch
from tricomm.explorer.compiled.driver import SimulatedDriver
from tricomm.explorer.compiled.simulated_gpu import SimulatedGpu
from tricomm.explorer.compiled.stream_queues import Executor, Ordering, Streams
from tricomm.explorer.ptx.analysis import limits
from tricomm.explorer.world.world import RankRuntime, SimulatedHandle, World
from tricomm.kernels import layout
from tricomm.kernels.launch import compiler, kernel_launch
from tricomm.kernels.launch.cuda_launcher import make_launcher
from tricomm.options import Options
from tricomm.policy import launch_shapes
from tricomm.store.control import ControlPage

# SMs of a common GPU of each architecture. They limit a group's grids.
PROCESSORS = {75: 72, 80: 108, 86: 84, 87: 16, 89: 142, 90: 132, 100: 148, 103: 148, 120: 170, 121: 48}


def capability_of(architecture: str) -> int:
    """90 of "sm_90". Raises `InvalidArgument` for an architecture that no kernel can be compiled for."""
    number = limits.capability(str(architecture))
    if (reason := compiler.refused()) is not None:
        raise InvalidArgument(f"nothing can be compiled: {reason}")
    return number


def checked_options(world_size: int, options: Options | None) -> Options:
    """`options`, or by default the smallest arena that has room for a GPU's tiles.

    Raises `InvalidArgument` with the bytes that are needed if the arena of `options` is too small for them.
    """
    smallest = _smallest(world_size)
    if options is None:
        return smallest
    try:
        plan = layout.plan(world_size, options.arena_bytes)
        launch_shapes.check_device("cuda", plan, options._tuning.tile)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{error}; compiled kernels have a GPU's tiles, which Options(arena_bytes={smallest.arena_bytes}) holds "
            f"for {world_size} ranks"
        ) from None
    return options


def _smallest(world_size: int) -> Options:
    nbytes = layout.MIN_ARENA
    while True:
        try:
            launch_shapes.check_device("cuda", layout.plan(world_size, nbytes), None)
            return Options(arena_bytes=nbytes)
        except InvalidArgument:
            if nbytes > 1 << 30:  # an impossible world size
                raise
            nbytes += nbytes // 2 if nbytes & (nbytes - 1) == 0 else nbytes // 3


class CompiledRanks:
    """The ranks of one execution whose kernels are compiled for `architecture`, such as "sm_90".

    `executor` runs their kernels, `orders` tracks happens-before.
    """

    def __init__(self, architecture: str, executor: Executor, orders: Ordering) -> None:
        self.capability = capability_of(architecture)
        self._executor, self._orders = executor, orders
        self._gpus: dict[int, SimulatedGpu] = {}
        self._at_compiler = 0

    def runtime(self, world: World, rank: int) -> CompiledRuntime:
        """Make the runtime of a rank's communicator, which is also the rank's GPU."""
        if rank not in self._gpus:
            turns = _RankTurns(world, rank)
            streams = Streams(rank, self._executor, self._orders, turns.changed, turns.refuse_strangers)
            self._gpus[rank] = SimulatedGpu(SimulatedDriver(streams, self.capability), turns)
        return CompiledRuntime(world, rank, self._gpus[rank], self.at_compiler)

    def compiling(self) -> float:
        """A value that keeps changing while a rank's host code compiles a kernel, so that the watchdog does not take
        the compilation for a hang."""
        return time.monotonic() if self._at_compiler else 0.0

    @contextmanager
    def at_compiler(self) -> Iterator[None]:
        self._at_compiler += 1
        try:
            yield
        finally:
            self._at_compiler -= 1

    def installed(self, in_host: Callable[[], int | None]) -> AbstractContextManager[None]:
        """A context manager in which `torch.cuda` and torch's operations run on the simulated GPUs. `in_host()` is the
        rank whose host code runs, or None."""

        def current() -> SimulatedGpu | None:
            rank = in_host()
            return None if rank is None else self._gpus.get(rank)

        return torch_cuda.installed(current)

    def in_order(self, rank: int, look: Callable[[], None]) -> None:
        """Call `look` when all earlier work of the rank's current stream has ended. The call is not part of the
        execution."""
        driver = self._gpus[rank].driver
        driver.queue_of(driver.current_stream).then(look)

    def finish(self, rank: int) -> None:
        """In the host code of a rank: wait for all work of its GPU. Raises what a kernel has raised."""
        if rank in self._gpus:
            self._gpus[rank].synchronize()

    def abandon(self) -> None:
        """End the execution: drop pending work, so that nothing waits for it."""
        for gpu in self._gpus.values():
            gpu.streams.abandon()


class _RankTurns:
    """How a rank's host code waits. Also a clock: it gives the world's time in host code, and this machine's
    elsewhere."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._changes, self._looked_at = 0, -1

    def changed(self) -> None:
        self._changes += 1
        self._world.turns.wake_hosts()

    @property
    def _here(self) -> bool:
        return self._world.turns.in_host() == self._rank

    def refuse_strangers(self) -> None:
        self._world.turns.refuse_strangers(self._rank)

    def wait(self) -> None:
        self.refuse_strangers()
        if self._here:
            self._world.turns.wait(self._rank)

    def give_way(self) -> None:
        self.refuse_strangers()
        if not self._here:
            return
        if self._looked_at == self._changes:  # a loop that only asks
            self._world.turns.wait(self._rank)
        else:
            self._looked_at = self._changes
            self._world.turns.give_way(self._rank)

    def monotonic(self) -> float:
        return self._world.now if self._here else time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        if self._here:
            self._world.turns.wait(self._rank)
        else:
            time.sleep(seconds)


class CompiledRuntime(RankRuntime):
    """One rank's end of a world, with a GPU."""

    def __init__(
        self, world: World, rank: int, gpu: SimulatedGpu, at_compiler: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__(world, rank)
        self._gpu, self._at_compiler = gpu, at_compiler

    def gpu(self, device: torch.device) -> Any:
        """As `tricomm.gpu.Gpu`, over the simulated driver."""
        return self._gpu

    def facts(self, device: torch.device) -> DeviceFacts:
        capability = self._gpu.driver.capability
        processors = PROCESSORS.get(capability, layout.MAX_BLOCKS)
        return DeviceFacts(f"simulated GPU of rank {self._rank}", f"sm_{capability}", processors, capability >= 90)

    def prepare(
        self, kernel: Any, grid: Any, args: Sequence[Any], constexprs: dict[str, Any], device: torch.device,
        timeout: float = 600.0, interrupt: Callable[[], None] | None = None,
    ) -> Callable[[], None]:  # fmt: skip
        with self._at_compiler():
            return user_launch.prepare(self._gpu.driver, kernel, grid, args, constexprs)

    def bind(
        self, kernel: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, aligned: bool,
        more: Sequence[int | torch.Tensor], group: kernel_launch.GroupArgument, timeout: float = 600.0,
    ) -> kernel_launch.BoundKernel:  # fmt: skip
        driver = self._gpu.driver
        with self._at_compiler():
            launch = make_launcher(kernel, blocks, constexprs, bits, aligned, more, group, driver)
        tables = (group[0], *(m for m in more if isinstance(m, torch.Tensor)))

        def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: kernel_launch.Rows = ()) -> None:
            operands = [value for row in rows for value in row if isinstance(value, torch.Tensor)]
            with driver.holding(tables if bits is None else (x, y, *operands, *tables)):
                launch(x, y, count, call, rows)

        return run

    def symmetric(
        self, control: ControlPage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, timeout: float,
        multicast: bool,
    ) -> SimulatedHandle:  # fmt: skip
        arena = super().symmetric(control, shape, dtype, device, timeout, multicast)
        arena.drain = self._gpu.synchronize
        return arena
