"""All ranks of a function, their kernels executed in turns, with nothing examined: for results, and for speed."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from greenlet import getcurrent, greenlet

from tricomm.errors import CollectiveTimeout, TricommError
from tricomm.explorer.compiled.compiled_runtime import CompiledRanks, checked_options
from tricomm.explorer.compiled.stream_queues import NoOrders
from tricomm.explorer.memory_model.regions import Memory
from tricomm.explorer.world.world import World
from tricomm.ptx import grid
from tricomm.ptx.global_memory import GlobalMemory
from tricomm.ptx.unit import Direct

_MOST_IDLE = 8  # times that time may pass without anything going on
_MOST_ROUNDS = 3000  # of kernels that only poll, as it seems, before time passes


class RoundRobin:
    """As the explorer's scheduler, for kernels and host code alike: each runs until it waits."""

    def __init__(self, fn: Any, world_size: int, architecture="sm_90", options=None, unit="block") -> None:
        self.memory, self.unit = Memory(), unit
        self.ranks = CompiledRanks(architecture, self, NoOrders())
        options = checked_options(world_size, options)
        self._main, self._units, self._waiting = getcurrent(), deque(), set()
        self.world = World(world_size, options, self.memory, self, None, runtime=self.ranks.runtime)
        self._hosts = [greenlet(lambda rank=rank: self._rank(rank, fn)) for rank in range(world_size)]
        self.results, self.errors, self.comms = [None] * world_size, {}, []
        self.launches, self._ended = 0, False

    def execute(self) -> list[Any]:
        idle = rounds = 0
        try:
            with self.ranks.installed(self.in_host):
                while not all(host.dead for host in self._hosts):
                    ran = [h for r, h in enumerate(self._hosts) if not h.dead and r not in self._waiting]
                    for host in ran:
                        host.switch()
                    units = list(self._units)
                    for unit in units:
                        unit.switch()
                    self._units = deque(u for u in self._units if not u.dead)
                    rounds = 0 if ran or self._ended else rounds + 1
                    self._ended = False
                    if rounds > _MOST_ROUNDS or not (ran or units):
                        rounds, idle = 0, idle + 1
                        self._waiting.clear()
                        if not self.world.pass_time() and idle > _MOST_IDLE:
                            raise CollectiveTimeout("no rank can go on")
        finally:
            self._close()
        for error in self.errors.values():
            raise error
        return self.results

    def _close(self) -> None:
        self.ranks.abandon()
        for task in [*self._units, *self._hosts]:
            if task and not task.dead:
                task.throw()
        for comm in self.comms:
            with suppress(TricommError):
                comm.close()
        self.world.close()

    def _rank(self, rank: int, fn: Any) -> None:
        try:
            self.comms.append(comm := self.world.join(rank))
            self.results[rank] = fn(comm)
            self.ranks.finish(rank)
            comm.check()
        except Exception as error:
            self.errors[rank] = error
            self.world.dead.add(rank)
        self.wake_hosts()

    # What the world asks of a scheduler

    def wait(self, rank: int) -> None:
        self._waiting.add(rank)
        self._main.switch()

    def give_way(self, rank: int) -> None:
        self._main.switch()

    def wake_hosts(self) -> None:
        self._waiting.clear()

    def in_host(self) -> int | None:
        here = getcurrent()
        return next((rank for rank, host in enumerate(self._hosts) if host is here), None)

    # What the streams ask of an executor

    def start(self, launch: Any, ended: Any) -> None:
        self.launches += 1
        memory = GlobalMemory()
        for region in self.memory:
            memory.add(region.base, region.nbytes, region.name)
        for tensor in launch.tensors:
            storage = tensor.untyped_storage()
            if all(not r.base <= storage.data_ptr() < r.base + r.nbytes for r in self.memory):
                memory.add(storage.data_ptr(), storage.nbytes(), "a tensor")
        loaded = grid.LoadedKernel(launch.loaded.kernel, memory)
        blocks = grid.launch(loaded, launch.grid, launch.threads, launch.shared, launch.parameters, self.unit)
        units = [unit for block in blocks for unit in block.units]
        left = [len(units)]

        def run(unit: Any) -> None:
            error = None
            try:
                unit(Direct(lambda: self._main.switch()))
            except Exception as raised:
                error = raised
            left[0] -= 1
            self._ended = True
            if error is not None or left[0] == 0:
                ended(error)

        self._units.extend(greenlet(lambda unit=unit: run(unit), parent=self._main) for unit in units)
