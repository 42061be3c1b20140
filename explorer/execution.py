"""One execution: every rank's function from beginning to end under one schedule, and its outcome."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from tricomm.communicator import Communicator
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.errors import CollectiveTimeout, GroupAborted, InvalidArgument, PeerDied, PeerStalled, TricommError
from tricomm.explorer.compiled.compiled_runtime import CompiledRanks
from tricomm.explorer.compiled.launches import Launches, Orders
from tricomm.explorer.compiled.stream_queues import NoOrders
from tricomm.explorer.compiled.thread_detector import ThreadDetector
from tricomm.explorer.compiled.unit_machine import UnitMachine
from tricomm.explorer.compiled.weak_memory import WeakMemory
from tricomm.explorer.interpreted.delays import Delays
from tricomm.explorer.interpreted.detector import Detector
from tricomm.explorer.interpreted.machine import Machine
from tricomm.explorer.memory_model import source_lines
from tricomm.explorer.memory_model.regions import Array, Memory, OutOfBounds, Region, closed_by
from tricomm.explorer.ptx.global_memory import BadAddress
from tricomm.explorer.ptx.units.unit import StepLimit
from tricomm.explorer.report import diagnosis
from tricomm.explorer.report.findings import Execution, Finding, Outcome, Subject
from tricomm.explorer.schedule import deadlocks
from tricomm.explorer.schedule.contention import Contention
from tricomm.explorer.schedule.host_watchdog import Blocked, OutOfTime, Watchdog
from tricomm.explorer.schedule.scheduler import Ended, Scheduler
from tricomm.explorer.schedule.strategies import Strategy
from tricomm.explorer.schedule.tasks import Launch, State
from tricomm.explorer.standins.module_state import importable
from tricomm.explorer.standins.program import SEEN, Standins
from tricomm.explorer.world.host_state import Hosts
from tricomm.explorer.world.oracle import Oracle
from tricomm.explorer.world.patches import Patches
from tricomm.explorer.world.world import World

_NAMED = (PeerDied, PeerStalled, CollectiveTimeout, GroupAborted)


class Ranks:
    """All ranks of one execution. With `detect` every access is examined, and the first deadlock ends it."""

    def __init__(
        self,
        subject: Subject,
        execution: Execution,
        strategy: Strategy,
        detect: bool,
        contention: Contention | None = None,
    ) -> None:
        size = subject.world_size
        self._subject, self._fault = subject, execution.fault
        compiled = subject.compiled is not None
        self._ranks: CompiledRanks | None = None
        self._detector = (ThreadDetector() if compiled else Detector(size)) if detect else None
        self._oracle = Oracle(size) if detect else None
        self._comms: dict[int, Communicator] = {}
        self._errors: dict[int, Exception] = {}
        self._deadlock: Finding | None = None
        self._stuck_at, self._looks = -1, False
        self._memory = Memory()
        self._machine, delays = _machine(self._memory, self._detector, contention, execution, compiled)
        # Random inputs are the same in every schedule of a campaign. Under `simulate` the seed is the user's.
        hosts = Hosts(0 if detect else execution.seed, size, self._memory, self._touched if detect else None)
        director = self._machine if isinstance(self._machine, Machine) else None
        self._hosts = hosts
        self._scheduler = Scheduler(
            strategy, director, subject.residency, subject.most_steps, subject.options.timeout, self._host
        )
        self._machine.scheduler = self._scheduler
        self._scheduler.before_step, self._scheduler.stuck = self._before_step, self._stuck
        self._scheduler.unfinished = lambda task: delays is not None and any(h.task is task for h in delays.held)
        self._scheduler.flush = lambda: self._machine.release_held(now=True)
        self._watchdog = Watchdog(self._progress, subject.options.stall_timeout, subject.ends)
        self._standins: Standins | None = None
        if subject.compiled is not None:
            self._ranks = self._compiled(subject.compiled)
        if subject.program:
            architecture = SEEN if self._ranks is None else self._ranks.capability
            self._standins = Standins(subject.fn, architecture, self._memory, self._scheduler, self._met)
        self._world = World(
            size,
            subject.options,
            self._memory,
            self._scheduler,
            self._run,
            self._met,
            self._planned,
            None if self._ranks is None else self._ranks.runtime,
        )

    def _compiled(self, architecture: str) -> CompiledRanks:
        detector, machine = self._detector, self._machine
        assert isinstance(machine, UnitMachine) and not isinstance(detector, Detector)
        # Under `check` warps take turns. Without a detector blocks do, because nothing would notice a difference.
        launches = Launches(self._scheduler, machine, self._memory, "block" if detector is None else "warp")
        return CompiledRanks(architecture, launches, NoOrders() if detector is None else Orders(detector))

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_EXITS.installed(self._scheduler.in_host))
            stack.enter_context(importable(getattr(self._subject.fn, "function", self._subject.fn)))
            if self._standins is not None:
                stack.enter_context(self._standins.installed())
            if self._ranks is not None:  # the innermost mode of torch, because other host code runs while it waits
                stack.enter_context(self._ranks.installed(self._scheduler.in_host))
            yield

    @contextmanager
    def _host(self, rank: int) -> Iterator[None]:
        """A context manager around the host code of a rank."""
        with self._hosts.of(rank), nullcontext() if self._standins is None else self._standins.of(rank):
            yield

    def _progress(self) -> object:
        return self._scheduler.turns, 0.0 if self._ranks is None else self._ranks.compiling()

    def execute(self) -> Outcome:
        """Run the execution. Raises `InvalidArgument` if host code blocks outside of tricomm, and `OutOfTime`."""
        scheduler, ended = self._scheduler, ""
        for rank in range(self._subject.world_size):
            scheduler.add_host(rank, lambda rank=rank: self._rank(rank))  # type: ignore[misc]
        try:
            try:
                with self._watchdog, self._installed():
                    scheduler.run()
            except OutOfTime as error:
                poll = scheduler.current.last_poll if scheduler.current is not None else None
                where = poll.site.where if poll is not None and _line(error) == "?" else _line(error)
                raise OutOfTime(f"after {scheduler.step} steps{f', at {where}' * (where != '?')}") from None
            except Blocked as error:
                raise self._blocked(error) from None
            except Ended as error:
                ended = str(error)
            if ended and self._deadlock is None and not (self._detector and self._detector.findings):
                self._deadlock = self._deadlocked(ended)
            return self._outcome()
        finally:
            self._close()

    # Called by the scheduler and the machine

    def _rank(self, rank: int) -> Any:
        try:
            self._comms[rank] = self._world.join(rank)
            fn, comm = self._subject.fn, self._comms[rank]
            result = fn(comm) if self._standins is None else self._standins.run(comm)
            if self._ranks is not None:
                self._ranks.finish(rank)
                if not self._comms[rank]._group.closed:
                    self._comms[rank].check()  # raises a fault that was detected after the last call
            return result
        except SystemExit as leave:
            error = RuntimeError(f"it called sys.exit({leave.code!r})").with_traceback(leave.__traceback__)
            self._failed(rank, error)
            raise error from leave
        except Exception as error:
            self._failed(rank, error)
            raise
        finally:
            self._scheduler.wake_hosts()

    def _failed(self, rank: int, error: Exception) -> None:
        self._errors[rank] = error
        self._world.dead.add(rank)  # to its peers, the rank is a process that has died

    def _run(self, rank: int, programs: list[Any], private: list[Region]) -> None:
        self._scheduler.launch(rank, programs, private, self._begin, self._end)

    def _begin(self, launch: Launch) -> None:
        if isinstance(self._detector, Detector):
            self._detector.begin(launch)

    def _end(self, launch: Launch) -> None:
        if isinstance(self._detector, Detector):
            self._detector.end(launch)

    def _met(self, rank: int, step: int, after: bool) -> None:
        if self._detector is not None:
            self._detector.met(rank, step, after)

    def _planned(self, rank: int, request: Request, plan: LaunchPlan) -> LaunchPlan:
        if self._oracle is None:
            return plan
        topology = self._subject.options.topology
        ranks = self._ranks
        aborted = lambda: self._world.leaving(rank)  # noqa: E731
        if ranks is None:
            return self._oracle.watched(request, plan, rank, topology, aborted)
        in_order = lambda look: ranks.in_order(rank, lambda: self._unseen(look))  # noqa: E731
        return self._oracle.watched(request, plan, rank, topology, aborted, in_order)

    def _unseen(self, look: Callable[[], None]) -> None:
        """Call `look`, which reads a stream's results, without the detector: it needs no order with the host."""
        self._looks = True
        try:
            look()
        finally:
            self._looks = False

    def _touched(self, rank: int, write: bool, region: Region, offsets: Array, itemsize: int) -> None:
        assert self._detector is not None
        if self._looks:
            return
        site = source_lines.of_host()
        if rank in region.closed:
            text = f"rank {rank}'s host code {'writes' if write else 'reads'} {closed_by(region, rank)}"
            self._detector.report(Finding("out_of_bounds", (rank,), (site.where,), text, diagnosis.IN_BOUNDS))
            return
        self._detector.host_access(rank, write, region, offsets, itemsize, site)
        if self._machine.contention is not None:
            self._machine.contention.host()

    def _before_step(self) -> None:
        step = self._scheduler.step
        if self._watchdog.interrupted:
            self._scheduler.end(KeyboardInterrupt())
        if self._watchdog.out_of_time():
            self._scheduler.end(OutOfTime())
        if self._detector is not None:
            self._detector.step = step
        self._machine.release_held()
        if self._fault is not None and step >= self._fault[2]:
            (kind, rank, _), self._fault = self._fault, None
            if self._scheduler.hosts[rank].state is not State.DONE:
                (self._world.dead if kind == "drop" else self._world.stopped).add(rank)
                self._scheduler.stop_rank(rank)

    def _stuck(self) -> bool:
        """No task can run and no store is delayed: a deadlock. The waiting calls raise a timeout."""
        scheduler, world = self._scheduler, self._world
        if self._detector is not None and any(map(_own_mistake, self._errors.values())):
            return False  # the other ranks wait as a consequence
        expected = bool(world.dead or world.stopped)
        if self._deadlock is None and not expected:
            why = "no task can run"
            self._deadlock = self._deadlocked(why)
            if self._detector is not None:
                return False
        again, self._stuck_at = scheduler.progress == self._stuck_at, scheduler.progress
        if world.pass_time() or not again:
            for rank in range(world.world_size):
                scheduler.wake_if_aborted(rank, self._memory)
            scheduler.wake_hosts(changed=False)
            return True
        why = "aborted, but still running"
        self._deadlock = self._deadlock or self._deadlocked(why)
        if not any(task.state is State.PARKED for task in scheduler.blocks):
            return False
        scheduler.fail_waiting(self._deadlock.text)
        return True

    def _deadlocked(self, why: str) -> Finding:
        scheduler = self._scheduler
        return deadlocks.deadlock(scheduler.blocks, scheduler.hosts, self._memory, self._world.left, why)

    # The end

    def _close(self) -> None:
        if self._ranks is not None:
            self._ranks.abandon()
        for comm in self._comms.values():
            try:
                comm.close()
            except TricommError:
                pass  # a stopped rank may be in the middle of a call
        self._world.close()
        if self._detector is not None:
            self._detector.close()

    def _blocked(self, error: BaseException) -> InvalidArgument:
        task = self._scheduler.current
        rank = task.rank if task is not None else -1
        where = _line(error)
        return InvalidArgument(
            f"rank {rank} has not come back to tricomm for {self._subject.options.stall_timeout:g} s, at {where}. "
            "All ranks take turns in one process: what waits for another rank must go through the communicator"
        )

    def _outcome(self) -> Outcome:
        hosts = self._scheduler.hosts[: self._subject.world_size]
        findings = list(self._detector.findings) if self._detector is not None else []
        for rank, error in self._errors.items():
            note(error, rank, self._subject.program)
        if self._detector is not None:
            findings += self._judged()
        return Outcome(
            {h.rank: h.result for h in hosts if h.state is State.DONE and h.error is None},
            dict(self._errors),
            findings,
            self._detector.records if self._detector is not None else [],
            tuple(self._scheduler.choices.made),
            self._scheduler.step,
            self._deadlock.text if self._deadlock is not None else None,
        )

    def _judged(self) -> list[Finding]:
        """The findings about the whole execution."""
        assert self._detector is not None and self._oracle is not None
        for rank, error in self._errors.items():
            if not isinstance(error, TricommError) or isinstance(error, BadAddress):
                return [self._raised(rank, error)]
        if self._deadlock is not None:
            return [self._deadlock]
        faulty = any(h.state is State.STOPPED for h in self._scheduler.hosts)
        for rank, error in self._errors.items():
            if not isinstance(error, OutOfBounds) and not (faulty and isinstance(error, _NAMED)):
                return [self._raised(rank, error)]  # the errors of the other ranks most likely follow from it
        findings = self._oracle.findings()
        if not self._errors and not faulty and not findings and not self._detector.findings:
            self._detector.leftovers([r for r in self._memory if r.kind == "arena"])
            findings = list(self._detector.findings)
        return findings

    def _raised(self, rank: int, error: Exception) -> Finding:
        kind = "wrong_result" if isinstance(error, AssertionError) else "exception"
        text = f"rank {rank} raised {type(error).__name__}: {error}"
        advice = "see the line"
        if not self._subject.program and not self._scheduler.step:
            advice += _mistaken(getattr(self._subject.fn, "function", self._subject.fn))
        return Finding(kind, (rank,), (_line(error),), text, advice)


def _machine(
    memory: Memory,
    detector: Detector | ThreadDetector | None,
    contention: Contention | None,
    execution: Execution,
    compiled: bool,
) -> tuple[Machine | UnitMachine, Delays | WeakMemory | None]:
    """The machine of an execution, and what delays its stores, if anything does."""
    seed, patience = execution.delays, execution.patience
    if compiled:
        assert not isinstance(detector, Detector)
        weak = WeakMemory(seed) if seed is not None and detector is not None else None
        at_random = None if contention is not None else execution.seed
        return UnitMachine(memory, detector, weak, contention, patience, at_random), weak
    assert not isinstance(detector, ThreadDetector)
    delays = Delays(seed) if seed is not None else None
    return Machine(memory, detector, delays, contention, patience), delays


def _mistaken(function: Callable[..., Any]) -> str:
    """A hint for a function that fails before its first access because its first parameter is no communicator."""
    try:
        names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    except ValueError:
        return ""
    if not names or names[0].startswith("comm"):
        return ""
    return (
        f"; {names[0]} was a tricomm.Communicator, as the first argument is without --args: for a function of tensors "
        "pass --args. Fixtures of @tricomm.checked come after the communicator, or after a * in a program over torch's "
        "symmetric memory"
    )


def _exiting(end: Callable[[int], None], process: int) -> Callable[[int], Callable[[int], Any]]:
    """`os._exit` for ranks: ends the rank, not the check, which would look clean. A forked child it ends as usual."""
    return lambda rank: sys.exit if os.getpid() == process else end


_EXITS = Patches(lambda: {(os, "_exit"): _exiting(os._exit, os.getpid())})


def _own_mistake(error: Exception) -> bool:
    """True for an error that tricomm does not raise, and for an address that no access may have."""
    return not isinstance(error, TricommError) or isinstance(error, OutOfBounds | BadAddress)


def note(error: BaseException, rank: int, program: bool = False) -> None:
    """Add the rank and the user's line to an error that the rank raised. The refusal of an
    unsupported call of a `program` has the line already."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        if program and isinstance(error, InvalidArgument) and not re.search(r"\.py:\d", error.args[0]):
            where = _line(error)
            error.args = (error.args[0] if where == "?" else f"{where}: {error.args[0]}",)
        if not re.search(rf"\brank {rank}\b", error.args[0]):
            error.args = (f"rank {rank}: {error.args[0]}",)
    error.add_note(f"on rank {rank}, at {_line(error)}")


def _line(error: BaseException) -> str:
    """file:line of the kernel, if the error names it; else of the innermost frame that is neither Triton's, nor
    torch's, nor tricomm's host code."""
    if isinstance(error, StepLimit) and error.where is not None:
        return error.where
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if source_lines.is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line}"
    return "?"
