"""Turns a launch into tasks of the scheduler, one for each warp, and tracks the happens-before order of launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np
import torch

from tricomm.explorer.compiled.events import site_of
from tricomm.explorer.compiled.module_table import KernelLaunch
from tricomm.explorer.compiled.race_checks import Maker
from tricomm.explorer.compiled.stream_queues import Ended
from tricomm.explorer.compiled.thread_clocks import Array
from tricomm.explorer.compiled.thread_detector import ThreadDetector
from tricomm.explorer.compiled.thread_teams import Team
from tricomm.explorer.compiled.unit_machine import Crew, UnitMachine
from tricomm.explorer.memory_model.clocks import longer
from tricomm.explorer.memory_model.regions import Memory, Region, span_of
from tricomm.explorer.ptx.global_memory import GlobalMemory
from tricomm.explorer.ptx.instructions import Instruction, PtxKernel
from tricomm.explorer.ptx.units import grid
from tricomm.explorer.report import diagnosis
from tricomm.explorer.schedule.scheduler import Scheduler
from tricomm.explorer.schedule.tasks import Launch, State, Task

_STEPS = 1 << 16  # a warp's loop iterations without an access to memory that others can access


@dataclass(eq=False)
class BlockMemory:
    """A block's shared memory for the detector: a region without a host address."""

    rank: int
    block: int
    bytes: Array = field(repr=False)
    kind: str = "block"
    name: str = "shared memory"
    shared: bool = False
    shadow: Any = None

    @property
    def nbytes(self) -> int:
        return len(self.bytes)

    def label(self, offset: int) -> str:
        return f"rank {self.rank}, block {self.block}'s shared memory byte {offset}"


@dataclass(frozen=True)
class Token:
    """A moment in the happens-before order: clocks by thread, and the times by block of `word_rule`."""

    threads: Array
    words: Array


def joined(one: Token | None, other: Token | None) -> Token | None:
    if one is None or other is None:
        return one or other
    return Token(_highest([one.threads, other.threads]), _highest([one.words, other.words]))


@dataclass(eq=False)
class Running:
    """A launch whose warps have not all ended."""

    launch: KernelLaunch
    task_launch: Launch
    crews: list[Crew]
    ended: Ended
    signalled: Callable[[], None]
    private: list[Region] = field(default_factory=list)


def code_of(launch: KernelLaunch) -> PtxKernel:
    """The code that a launch executes."""
    return launch.loaded.kernel


class Launches:
    """Runs the kernels of an execution as tasks: the executor of the simulated drivers."""

    def __init__(self, scheduler: Scheduler, machine: UnitMachine, memory: Memory, unit: str) -> None:
        self._scheduler, self._machine, self._memory, self._unit = scheduler, machine, memory, unit
        self._detector = machine.detector
        self._alive: list[Running] = []
        # by first and last byte: the region, and how many launches use it
        self._private: dict[tuple[int, int], tuple[Region, int]] = {}

    def start(self, launch: KernelLaunch, ended: Ended, signalled: Callable[[], None]) -> None:
        """As `stream_queues.Executor`."""
        private = self._borrow(launch)
        memory = GlobalMemory()
        for region in [*self._memory, *private]:
            memory.add(region.base, region.nbytes, region.name)
        for mapping in self._memory.multicast:
            memory.add_multicast(*mapping)
        kernel = code_of(launch)
        loaded = grid.LoadedKernel(kernel, memory, self._detector is not None, _STEPS)
        blocks = grid.launch(loaded, launch.grid, launch.threads, launch.shared, launch.parameters, unit=self._unit)
        made = self._scheduler.new_launch(launch.rank, launch.loaded.name, private)
        launch.handed = launch.after
        running = Running(launch, made, [], ended, signalled, private)
        threads = int(np.prod(launch.threads))
        for number, block in enumerate(blocks):
            shared = BlockMemory(launch.rank, number, block.shared.view(np.uint8))
            crew = Crew(self._maker(launch, kernel, number, threads, made.number), shared)  # type: ignore[arg-type]
            for warp, unit in enumerate(block.units):
                task = Task(launch.rank, number, _nothing, launch=made, warp=warp)
                task.run = self._run(unit, task, crew, running)
                crew.tasks.append(task)
                if self._machine.weak is not None:
                    self._machine.weak.synchronised(task)
            for task in crew.tasks:
                task.mates = crew.tasks
            running.crews.append(crew)
            made.blocks += crew.tasks
        self._alive.append(running)
        made.ended = lambda: self._over(running)
        self._scheduler.begin(made)

    def _run(self, unit: Any, task: Task, crew: Crew, running: Running) -> Callable[[], None]:
        surroundings = Warp(self, self._machine, task, crew, running)

        def run() -> None:
            with np.errstate(all="ignore"):
                unit(surroundings)
            self._machine.leave(crew, unit.threads)
            self._scheduler.finish_stores(task)
            if all(mate is task or mate.state is State.DONE for mate in crew.tasks):
                self.signal(running, crew)

        return run

    def wait(self, running: Running, task: Task, crew: Crew, threads: Array, instruction: Instruction) -> None:
        """Execute `griddepcontrol.wait`: return when the launches that this one depends on have ended."""
        before, crew.waited = running.launch.before, True
        if not before:
            return
        self._machine.wait(task, crew, lambda: all(launch.ended for launch in before), instruction)
        end = reduce(joined, (launch.end for launch in before))
        if self._detector is not None and end is not None:
            self._detector.clocks.begin_again(crew.maker.team, threads, end.threads)
            self._detector.words.learn(running.launch.rank, crew.maker.block, end.words)
        if self._machine.weak is not None:
            self._machine.weak.synchronised(task)

    def signal(self, running: Running, crew: Crew) -> None:
        """A block has executed `griddepcontrol.launch_dependents` or has ended. After the last one, dependent launches
        may begin."""
        launch = running.launch
        if crew.signalled:
            return
        crew.signalled = True
        if crew.waited:
            launch.handed = reduce(joined, (before.end for before in launch.before), launch.handed)
        if all(other.signalled for other in running.crews):
            launch.signalled = True
            running.signalled()

    def _maker(self, launch: KernelLaunch, kernel: PtxKernel, block: int, threads: int, number: int) -> Maker:
        if self._detector is None:
            team = Team(0, launch.rank, np.arange(threads), [], np.zeros(0, np.int32), threads)
            return Maker(team, block, number, kernel, caller=launch.caller)
        token = launch.after or Token(np.zeros((2, 1), np.int32), np.zeros(1, np.int32))
        self._detector.words.learn(launch.rank, block, token.words)
        team = self._detector.clocks.team(launch.rank, threads, token.threads)
        return Maker(team, block, number, kernel, bool(launch.before), launch.stream, launch.caller)

    def _over(self, running: Running) -> None:
        launch, error = running.launch, running.task_launch.error
        if self._detector is not None:
            detector = self._detector
            known = [detector.clocks.end(crew.maker.team) for crew in running.crews]
            words = [detector.words.row(launch.rank, crew.maker.block) for crew in running.crews]
            launch.end = Token(_highest(known), _highest(words))
            if launch.dependent and error is None and not any(crew.waited for crew in running.crews):
                detector.report(diagnosis.never_waits(launch.rank, launch.loaded.name, _line_of(code_of(launch))))
        self._give_back(running.private)
        launch.ended, launch.before = True, ()
        self._alive.remove(running)
        for other in self._alive:
            if launch in other.launch.before:
                for crew in other.crews:
                    self._machine.poke(crew)
        running.ended(error)

    # Memory that only launches of one rank can access

    def _borrow(self, launch: KernelLaunch) -> list[Region]:
        regions = []
        for low, high in _spans([t for t in launch.tensors if isinstance(t, torch.Tensor) and t.numel()]):
            if self._memory.region(low, high, []) is not None:
                continue
            region, users = self._private.get((low, high), (None, 0))
            if region is None:
                region = Region("private", launch.rank, low, high - low, f"rank {launch.rank}'s tensor")
            self._private[low, high] = region, users + 1
            regions.append(region)
        return regions

    def _give_back(self, private: list[Region]) -> None:
        for region in private:
            key = region.base, region.end
            _, users = self._private[key]
            if users == 1:
                del self._private[key]
            else:
                self._private[key] = region, users - 1


class Warp:
    """The `Surroundings` of one unit, a warp or a block."""

    def __init__(self, launches: Launches, machine: UnitMachine, task: Task, crew: Crew, running: Running) -> None:
        self._machine = machine
        self.access = partial(machine.access, task, crew)
        self.fence = partial(machine.fence, task, crew)
        self.barrier = partial(machine.barrier, task, crew)
        self.arrive = partial(machine.arrive, task, crew)
        self.wait = partial(machine.wait, task, crew)
        self.warp_barrier = partial(machine.warp_barrier, task, crew)
        self.wait_for_launches = partial(launches.wait, running, task, crew)
        self.launch_dependents = partial(launches.signal, running, crew)

    def nanotime(self) -> int:
        return 100 * self._machine.scheduler.turns


class Orders:
    """Implements `stream_queues.Ordering` by the detector's clocks."""

    def __init__(self, detector: ThreadDetector) -> None:
        self._detector = detector

    def host(self, rank: int) -> Token:
        detector = self._detector
        return Token(detector.clocks.row(detector.host(rank).team), detector.words.row(rank))

    def learn(self, rank: int, token: Token | None) -> None:
        if token is not None:
            detector = self._detector
            detector.clocks.learn(detector.host(rank).team, np.zeros(1, np.int64), token.threads)
            detector.words.learn(rank, -1, token.words)

    def join(self, one: Token | None, other: Token | None) -> Token | None:
        return joined(one, other)

    @contextmanager
    def operation(self, rank: int, after: Token | None) -> Iterator[Callable[[], Token]]:
        detector = self._detector
        after = after or Token(np.zeros((2, 1), np.int32), np.zeros(1, np.int32))
        team = detector.clocks.team(rank, 1, after.threads, host=True)
        before = detector.acting.get(rank)
        detector.acting[rank] = Maker(team)
        try:
            yield lambda: Token(detector.clocks.row(team), _highest([after.words, detector.words.row(rank)]))
        finally:
            detector.clocks.end(team)
            if before is None:
                del detector.acting[rank]
            else:
                detector.acting[rank] = before


def _spans(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """The byte ranges of the tensors' elements; overlapping ones are merged."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(map(span_of, tensors)):
        if joined and low < joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined


def _line_of(kernel: PtxKernel) -> str:
    """file:line of the kernel's first instruction."""
    return next((site_of(each, kernel.name).where for each in kernel.instructions if each.source), kernel.name)


def _highest(rows: list[Array]) -> Array:
    size = max(row.shape[-1] for row in rows)
    return reduce(np.maximum, [longer(row, size) for row in rows])


def _nothing() -> None:
    pass
