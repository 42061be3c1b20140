"""Runs the tasks of all ranks, one step at a time, in the order that a strategy chooses. A step is an access to shared
memory.

Host code runs first whenever it can, because it changes memory that kernels poll only through launches. So the choice
is always among blocks of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import greenlet

from tricomm.errors import CollectiveTimeout, InvalidArgument
from tricomm.explorer.memory_model import source_lines
from tricomm.explorer.memory_model.regions import Array, Memory, Region
from tricomm.explorer.schedule.strategies import Choices, Strategy, default
from tricomm.explorer.schedule.tasks import Launch, State, Task
from tricomm.kernels.launch import interpreter, triton_adapter
from tricomm.kernels.launch.interpreter import Program
from tricomm.kernels.launch.memory_access import Director

_RETRIES = 8  # retries of a loop with a strong load, which is a wait
_WEAK_STEPS = 8000  # steps without progress for which a loop of weak loads is retried, because it may end
_PARKED_STEPS, _ALONE_STEPS = 1000, 5000


class Ended(Exception):
    """The execution ends before its tasks do, because of a finding, or because no step is left."""


class Scheduler:
    """Schedules all tasks. `residency` is the number of a launch's blocks that can be resident on a rank's device;
    None: all."""

    def __init__(
        self,
        strategy: Strategy,
        director: Director | None,
        residency: int | None = None,
        most_steps: int = 1_000_000,
        interpreter_timeout: float = 600.0,
        host_context: Callable[[int], AbstractContextManager[Any]] = lambda rank: nullcontext(),
    ) -> None:
        self.step = 0
        self.turns = 0  # grows with every switch and every access, for the watchdog
        self._progress = 0, 0  # `progress` at the last retry, and the step of its last change
        self.progress = 0  # grows when memory or the host's shared state changes, a launch begins or a task ends
        self.choices = Choices()
        self.current: Task | None = None
        self.hosts: list[Task] = []
        self.blocks: list[Task] = []
        self.before_step: Callable[[], None] = lambda: None
        self.flush: Callable[[], bool] = lambda: False  # called when no task can run: performs the delayed stores
        self.unfinished: Callable[[Task], bool] = lambda task: False
        self.stuck: Callable[[], bool] = lambda: False  # called when no task can run: unblocks one, or returns False
        self.closing = False
        self.aborted: dict[int, bytes] = {}  # by rank: its abort and status words
        self._stranger: InvalidArgument | None = None
        self._strategy, self._director = strategy, director
        self._residency, self._most = residency, most_steps
        self._timeout, self._host_context = interpreter_timeout, host_context
        self._engaged, self._launches, self._since = False, 0, 0
        self._gave_way: set[int] = set()
        self._ran: set[Task] = set()  # tasks that have run since step `_since` while others could
        self._rest: set[Task] = set()  # tasks that are not chosen until step `_since` + _ALONE_STEPS
        self._main = greenlet.getcurrent()

    def add_host(self, rank: int, run: Callable[[], Any]) -> Task:
        task = Task(rank, -1, run)
        self.hosts.append(task)
        return task

    # Called by tasks

    def launch(
        self,
        rank: int,
        programs: list[Program],
        private: list[Region],
        begin: Callable[[Launch], None],
        end: Callable[[Launch], None],
    ) -> None:
        """Called in a rank's host code: run a kernel, and return when it has ended. Raises the kernel's errors."""
        self._refuse_when_closing()
        host = self._here(rank)
        launch = self.new_launch(rank, programs[0].kernel.fn.__name__, private)
        launch.host = host
        for number, program in enumerate(programs):
            task = Task(rank, number, program, program, launch)
            task.run = lambda task=task: self._block(task)  # type: ignore[misc]
            launch.blocks.append(task)
        begin(launch)
        self.begin(launch)
        host.launch, host.state, host.host_site = launch, State.WAITING, source_lines.of_host()
        self._main.switch()
        host.launch = None
        self._refuse_when_closing()
        end(launch)
        if launch.error is not None:
            raise launch.error

    def _here(self, rank: int) -> Task:
        """The task of the host code that makes this call."""
        self.refuse_strangers(rank)
        return self.current if self.current and self.in_host() == rank else self.hosts[rank]

    def refuse_strangers(self, rank: int) -> None:
        """Raise `InvalidArgument`, and let `run` raise it, if the caller is not the rank's own host code. Such a caller
        takes no turns, and its blocks would run after it has returned."""
        if greenlet.getcurrent() is self._main or self.in_host() == rank:
            return
        other, thread = self.in_host(), threading.current_thread()
        who = f"thread {thread.name!r}" if other is None else f"rank {other}'s function"
        error = InvalidArgument(
            f"rank {rank}: {who} makes a call of rank {rank}'s communicator at {source_lines.of_host().where}. Under "
            "simulate and check all ranks take turns in one thread, so a rank's calls are made by its own function: "
            "make this one there"
        )
        self._stranger = self._stranger or error
        raise error

    def new_launch(self, rank: int, name: str, private: list[Region]) -> Launch:
        self._launches += 1
        return Launch(rank, self._launches, name, [], private)

    def begin(self, launch: Launch) -> None:
        """Make the blocks of a launch runnable."""
        self.progress += 1
        for task in launch.blocks:
            task.greenlet.parent = self._main  # where control continues when the task ends
        self.blocks = sorted([*self.blocks, *launch.blocks], key=lambda t: t.place)

    def _block(self, task: Task) -> None:
        assert task.program is not None
        task.program()
        self.finish_stores(task)

    def finish_stores(self, task: Task) -> None:
        """Called in a block at its end: wait until all its stores have reached memory."""
        while self.unfinished(task):  # its last stores have not reached memory
            self.take_turns()

    def wait(self, rank: int) -> None:
        """Called in a rank's host code: let other tasks run. Returns when shared state may have changed."""
        self._refuse_when_closing()
        host = self._here(rank)
        host.state, host.host_site = State.WAITING, source_lines.of_host()
        self._main.switch()
        self._refuse_when_closing()

    def give_way(self, rank: int) -> None:
        """As `wait`; also returns when no other task can run."""
        self._gave_way.add(rank)
        try:
            self.wait(rank)
        finally:
            self._gave_way.discard(rank)

    def take_turns(self) -> None:
        """Called in a block before an access to shared memory: the scheduler may switch to another task."""
        task = self.current
        self.step += 1
        if self.step > self._most:
            self.end(Ended(f"no end after {self._most} steps"))
        if self.step % _PARKED_STEPS == 0:  # a loop that is never parked must not keep parked tasks from being retried
            self._retry()
        self.before_step()
        ready = self._ready()
        if task not in ready or (chosen := self._choose(ready)) is not task:
            self._main.switch(None if task not in ready else chosen)

    def end(self, error: BaseException) -> None:
        """Called in a block: make `run` raise `error`."""
        self._main.throw(error)

    def park(self) -> None:
        """Called in a block whose polled memory has not changed: sleep until it does."""
        assert self.current is not None
        self.current.state = State.PARKED
        self._main.switch()

    def in_host(self) -> int | None:
        """The rank whose host code makes this call; None elsewhere."""
        task = self.current
        return task.rank if task and task.is_host and greenlet.getcurrent() is task.greenlet else None

    # Called by the machine and the execution

    def wrote(self, addresses: Array) -> None:
        """Memory at `addresses` has changed. The tasks that poll it become ready."""
        self.progress += 1
        low, high = int(addresses.min()), int(addresses.max())
        for task in self.blocks:
            if task.state is State.PARKED:
                task.retries = 0
                if task.watches(low, high):
                    self.wake(task)

    def wake(self, task: Task) -> None:
        task.state, task.retries, task.repeated = State.READY, 0, []

    def wake_if_aborted(self, rank: int, memory: Memory) -> None:
        """If the abort or status word of the rank has changed and is set, wake its blocks and park them later than
        otherwise."""
        words = memory.abort_words(rank)
        if any(words) and words != self.aborted.get(rank):
            self.aborted[rank] = words
            for task in self.blocks:
                if task.rank == rank and task.state is State.PARKED and task.waits is None:
                    self.wake(task)

    def wake_hosts(self, changed: bool = True) -> None:
        """Wake host code, because shared state that it may wait for has changed, or (not `changed`) because time has
        passed."""
        self.progress += changed
        for host in self.hosts:
            if host.state is State.WAITING and host.launch is None:
                host.state = State.READY

    def stop_rank(self, rank: int) -> None:
        """From now on, no task of the rank runs."""
        for task in [*self.hosts, *self.blocks]:
            if task.rank == rank and task.state is not State.DONE:
                task.state = State.STOPPED

    def fail_waiting(self, text: str) -> None:
        """Raise `CollectiveTimeout` in every block that still polls."""
        for task in list(self.blocks):
            if task.state is State.PARKED:
                self._throw(task, CollectiveTimeout(f"timeout: {text}"))

    # The loop

    def run(self) -> None:
        """Run until the host code of every rank has ended. Raises `Ended` if the execution is cut short, and
        `InvalidArgument` after a call that was not made by a rank's own host code."""
        try:
            following = None
            while True:
                following = following if following is not None else self._next()
                if following is None:
                    return
                following = self._resume(following)
                self._settle()
                if self._stranger is not None:
                    raise self._stranger
        finally:
            self._close()

    def _next(self) -> Task | None:
        while True:
            hosts = [h for h in self.hosts if h.state is State.READY]
            if hosts and self._strategy.hosts_first:
                return hosts[0]
            ready = self._ready()
            if hosts and (chosen := self._strategy.choose(self.step, self.current, hosts + ready)).is_host:
                return chosen
            if ready:
                return self._choose(ready)
            if all(h.state in (State.DONE, State.STOPPED) for h in self.hosts):
                return None
            if self._gave_way:
                self.hosts[min(self._gave_way)].state = State.READY
                continue
            if not self.flush() and not self._retry() and not self.stuck():
                raise Ended("no task can run")

    def _ready(self) -> list[Task]:
        return [t for t in self.blocks if t.state is State.READY and (t.started or self._may_start(t))]

    def _may_start(self, task: Task) -> bool:
        launch = task.launch
        if self._residency is None or launch is None:
            return self._residency is None
        return launch.running < self._residency or launch.has_begun(task.block)

    def _choose(self, ready: list[Task]) -> Task:
        """The strategy's choice. Tasks that have run for long while others could have run are suspended, because they
        may wait for one of the others in a loop that changes memory."""
        if self.step - self._since >= _ALONE_STEPS:
            self._rest, self._ran, self._since = set() if self._rest else self._ran, set(), self.step
        ready = [t for t in ready if t not in self._rest] or ready
        chosen = self._strategy.choose(self.step, self.current, ready)
        if not self._rest:
            self._ran.add(chosen)
            if self._ran.issuperset(ready):
                self._ran, self._since = {chosen}, self.step
        self.choices.note(self.step, chosen.key, chosen is not default(self.current, ready))
        return chosen

    def _retry(self) -> bool:
        """Let parked tasks run another round of their loops, because a loop that ends after a few reads is not a poll.
        It is a whole round: at its end, another warp of the block may wait that has already read the new value."""
        self._progress = self._progress if self.progress == self._progress[0] else (self.progress, self.step)
        few = self.step - self._progress[1] < _WEAK_STEPS
        parked = (task for task in self.blocks if task.state is State.PARKED)
        again = [t for t in parked if t.retries < _RETRIES or (few and not t.waits_strongly())]
        for task in again:
            if task.waits is None:
                del task.repeated[len(task.repeated) - len(task.loop()) :]
            task.state, task.retries = State.READY, task.retries + 1
        return bool(again)

    def _resume(self, task: Task) -> Task | None:
        self._engage(task)
        self.current = task
        self.turns += 1
        with self._host_context(task.rank) if task.is_host else nullcontext():
            chosen = task.greenlet.switch()
        return chosen if isinstance(chosen, Task) else None

    def _engage(self, task: Task) -> None:
        if task.program is None:
            self._disengage()
            return
        if not self._engaged:
            assert self._director is not None
            interpreter.engage(self._director, self._timeout)
            self._engaged = True
        task.program.select()

    def _disengage(self) -> None:
        if self._engaged:
            self._engaged = False
            interpreter.disengage()

    def _settle(self) -> None:
        """Remove a block that has ended. If its launch has ended, let the launch's host code continue."""
        task = self.current
        if task is None or task.state is not State.DONE:
            return
        self.progress += 1
        if task.launch is None:
            return
        launch = task.launch
        self.blocks.remove(task)
        if task.error is not None and launch.error is None:
            launch.error = task.error
            for other in launch.blocks:
                if other.state is not State.DONE:
                    self._throw(other, greenlet.GreenletExit())
        self._finish(launch)

    def _finish(self, launch: Launch) -> None:
        if launch.ended is not None:
            if launch.done:
                ended, launch.ended = launch.ended, lambda: None
                ended()
            return
        host = launch.host or self.hosts[launch.rank]
        if launch.done and host.state is State.WAITING:
            host.state = State.READY

    def _throw(self, task: Task, error: BaseException) -> None:
        """End a waiting block by raising `error` in it. greenlet.GreenletExit does not count as an error."""
        if task.started:
            self._engage(task)
            task.greenlet.throw(error)
        self.progress += 1
        task.state = State.DONE
        if task in self.blocks:
            self.blocks.remove(task)
        if task.launch is not None:
            if task.error is not None and task.launch.error is None:
                task.launch.error = task.error
            self._finish(task.launch)

    def _refuse_when_closing(self) -> None:
        if self.closing:
            raise greenlet.GreenletExit

    def _close(self) -> None:
        """Unwind every task that has begun, and restore Triton."""
        current, self.closing = self.current, True
        try:
            for task in [*self.blocks, *self.hosts]:
                if task.started and not task.greenlet.dead:
                    self._engage(task)
                    self.current = task
                    with self._host_context(task.rank) if task.is_host else nullcontext():
                        task.greenlet.throw(greenlet.GreenletExit)
        finally:
            self.current = current
            self._disengage()
            triton_adapter.refresh()
