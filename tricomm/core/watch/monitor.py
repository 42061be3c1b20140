"""Watches one communicator: sends heartbeats, reads the peers' heartbeats, and aborts a call that cannot finish.

A kernel writes to the control page that it runs (`started` is its epoch, `ended` the epoch after it), so the monitor
sees both eager calls and graph replays. A peer has done its part in the running call once its `ended` is past that
epoch; after that its death does not affect this call.

Time is the sum of the intervals between looks, each counted as at most a quarter of a second, so that a process that
was stopped or starved does not blame the others. All groups' monitors share one thread (`watcher`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from tricomm import errors, threads
from tricomm.core.watch.in_flight import InFlight, UserCall
from tricomm.core.watch.watcher import WATCHER, Watcher
from tricomm.errors import GroupAborted, ResourceError
from tricomm.store.control import RING, ControlPage, Fault, RankState

_USER_SECONDS = 1.0
_QUIET_SECONDS = 0.5  # without a heartbeat, before the CPU time of the process is checked
_COMPARE_SECONDS = 0.1  # before a call's peers are checked for other calls
_SHARED = {"CollectiveMismatch", "PeerDied", "PeerStalled"}


class FallbackBackend(Protocol):
    """A backend other than the kernels (NCCL): the monitor polls its errors, and aborts it with the group."""

    def error(self) -> str | None: ...
    def abort(self) -> None: ...


class Monitor:
    """Detects a peer that is dead, stopped, late or in another call, and makes a named fault of it.

    `control` is the group's control page; `timeout` and `stall_timeout` are in seconds. `fault` is None until the group
    is aborted; a later fault does not replace the first. `lost` is a rank whose process ended or that closed the group,
    so that a call would wait for it in vain. `in_flight` describes the call that this rank runs. Its `describers` are
    functions, by the code that a kernel reports in the status word, which make a fault of the peer and the number in
    the report; they are added before `start`, and `stop` drops them. While the group is `suspended` no call would
    notice a dead peer, so its death alone is a fault. `waited` has, by peer, the seconds that calls waited until it
    entered.
    """

    def __init__(self, control: ControlPage, timeout: float, stall_timeout: float, watcher: Watcher = WATCHER) -> None:
        self.fault: Fault | None = None
        self.lost: int | None = None
        self.in_flight = InFlight(control)
        self.waited = {r: 0.0 for r in range(control.world_size) if r != control.rank}
        self._control, self._watcher = control, watcher
        self._timeout = timeout
        self._stall = stall_timeout
        self._peers = control.peers
        self._backends: list[FallbackBackend] = []
        self._lock = threading.RLock()  # reentrant, because a signal handler may abort the group while this thread does
        self._spread = False
        self.stopped, self.looked = False, 0.0  # the watcher's
        self.suspended = False
        self._release: Callable[[], None] | None = None
        self._beats: dict[int, tuple[int, float]] = {}
        self._ticks: dict[int, int] = {}
        self._absent: dict[int, float] = {}
        self._describe: Callable[[int], str] = str
        self._report: Callable[[], object] = str

    def start(self, describe: Callable[[int], str], report: Callable[[], object] = str) -> None:
        """Begin to watch. `describe(n)` names the peer for which message number n waits; `report` is called after a
        fault, and may not block."""
        self._describe, self._report = describe, report
        self._watcher.add(self)

    def watch(self, backend: FallbackBackend) -> None:
        """From now on also poll `backend` for errors, and abort it with the group."""
        self._backends.append(backend)

    def stop(self) -> None:
        """End the watch; on return no thread accesses the group any more. Idempotent."""
        self._watcher.discard(self)
        # Drop the views, which keep a mapping alive, and the cycle of group and monitor.
        self._peers = ()
        self.in_flight.forget()
        self._describe = str

    def abandon(self, release: Callable[[], None]) -> None:
        """Called when the communicator is garbage-collected: call `release`, which raises nothing, on the watcher's
        thread, because this thread may hold any lock now. Does nothing if the monitor is stopped."""
        self._release = None if self.stopped else release

    def abort(self, fault: Fault) -> Fault:
        """Record `fault` unless there is one already, tell the peers, and make the kernels leave. Returns the first."""
        with self._lock:
            if self.fault is None:
                self.fault = fault
            if not self._spread:  # an interrupt may have stopped the first attempt midway; each step can be repeated
                self.in_flight.leave()
                self._control.raise_fault(self.fault)
                self._control.set_state(RankState.ABORTED)
                self._spread = True
                self._abort_backends()
                self._report()
            return self.fault

    def _abort_backends(self) -> None:
        """Abort each backend on another thread, because NCCL may take any time."""
        while self._backends:
            backend = self._backends.pop()
            try:
                threads.start("tricomm-abort", backend.abort)
            except ResourceError:  # the next look tries again
                self._backends.append(backend)
                return

    def diagnose(self) -> None:
        """Abort the group if a kernel has reported a fault in the status word."""
        fault = self.in_flight.reported()
        if fault is not None:
            self.abort(fault)

    def _gone(self, rank: int) -> bool:
        return self._control.page(rank).state == RankState.CLOSED or not self._control.alive(rank)

    def _killed(self) -> int | None:
        """A rank whose process has ended without closing the group."""
        control, left = self._control, RankState.CLOSED
        return next((r for r in self._peers if control.page(r).state != left and not control.alive(r)), None)

    def busy(self) -> bool:
        """Whether a call of this rank runs, or a kernel has reported something. Very cheap."""
        return self.in_flight.busy

    def beat(self) -> None:
        """Tell the peers that this process runs; does nothing if the group is being closed."""
        with suppress(GroupAborted):
            self._control.beat()

    def look(self, tick: float) -> None:
        """Check the peers, `tick` seconds after the last time. An error in this affects this group only."""
        if self._release is not None:
            self._release()
            return
        if self.fault is not None:
            self._abort_backends()
            return
        try:
            self._look(tick)
        except Exception as error:  # if the monitor failed silently, the next call could hang
            text = f"rank {self._control.rank}'s monitor failed: {type(error).__name__}: {error}"
            with suppress(GroupAborted):
                self.abort(Fault(errors.GroupAborted.__name__, self._control.rank, 0, text))

    def _look(self, tick: float) -> None:
        self._count(tick)
        self.lost = next((r for r in self._peers if self._gone(r)), None)
        if self.in_flight.status:
            self.diagnose()
            return
        for rank in self._peers:
            fault = self._control.page(rank).fault()
            if fault is not None:
                self._adopt(rank, fault)
                return
        error = next((text for backend in self._backends if (text := backend.error()) is not None), None)
        if error is not None:
            self._blame(errors.GroupAborted, self._control.rank, error)
            return
        killed = self._killed() if self.suspended else None
        if killed is not None:
            self.died(killed)
            return
        if self.in_flight.counts:
            self._look_at_call(tick)

    def _look_at_call(self, tick: float) -> None:
        """Check the call that runs, `tick` seconds after the last time."""
        running = self.in_flight
        if running.elapsed > _COMPARE_SECONDS and self.diverging():
            return
        for rank in running.not_entered():
            self.waited[rank] += tick
        late = running.unfinished()
        for rank in late:
            if self._gone(rank):
                if self._needs(rank):
                    self.died(rank)
                    return
            elif min(running.elapsed, self._beats[rank][1]) > self._stall:
                self._stalled(rank)
                return
        if running.elapsed - running.loading > self._timeout:
            self._late(late)

    def diverging(self) -> bool:
        """Compare this rank's calls with the other ranks', because a kernel and NCCL share no mailbox in which they
        could notice a difference. If they differ, abort the group and return True."""
        control = self._control
        for rank in self._peers:
            last = min(control.page(control.rank).sequence(), control.page(rank).sequence())
            for sequence in range(last, max(0, last - RING), -1):
                mine = control.page(control.rank).called(sequence)
                theirs = control.page(rank).called(sequence)
                if mine is not None and theirs is not None and mine.fingerprint != theirs.fingerprint:
                    text = different(control.rank, mine.text(), rank, theirs.text())
                    self.abort(Fault(errors.CollectiveMismatch.__name__, rank, sequence, text))
                    return True
        return False

    def _needs(self, rank: int) -> bool:
        """True if the running call waits for `rank`, which is gone. Called only then, because the rank may have done
        its part just before. A message may have been sent before, and a user's kernel may not need that rank at all, so
        these get a second to end. A receive from any rank can complete while one peer is left."""
        running = self.in_flight
        if running.in_epoch():
            return rank in running.unfinished()
        leaver = self._control.page(rank).state == RankState.CLOSED
        needed = list(self._peers) if running.from_any and leaver else [rank]
        return min(running.elapsed, *(self._absent.get(r, 0.0) for r in needed)) > _USER_SECONDS

    def _count(self, tick: float) -> None:
        """Add a tick to the age of each peer's heartbeat that has not changed since the last tick."""
        self.in_flight.count(tick)
        for rank in self._peers:
            beat = self._control.page(rank).heartbeat
            before, age = self._beats.get(rank, (beat, 0.0))
            age = age + tick if beat == before else 0.0
            self._beats[rank] = beat, 0.0 if self._works(rank, age) else age
            self._absent[rank] = self._absent.get(rank, 0.0) + tick if self._gone(rank) else 0.0

    def _works(self, rank: int, age: float) -> bool:
        """Whether a peer without a heartbeat for `age` seconds has used CPU time since the last look: a long call in C
        that holds the GIL, as in imports and unpickling, blocks the heartbeat."""
        if age < min(_QUIET_SECONDS, self._stall / 2):
            self._ticks.pop(rank, None)
            return False
        ticks = self._control.cpu_ticks(rank)
        before = self._ticks.setdefault(rank, ticks)
        self._ticks[rank] = ticks
        return ticks > before

    def _adopt(self, rank: int, fault: Fault) -> Fault:
        kind = fault.kind if fault.kind in _SHARED else errors.GroupAborted.__name__
        text = fault.text if fault.kind in _SHARED else f"rank {rank} aborted the group: {fault.text}"
        return self.abort(Fault(kind, fault.culprit, fault.sequence, text))

    def died(self, rank: int) -> Fault:
        """Abort the group because `rank` is gone, with the fault that it has published, if any. If it closed without
        one and another rank was killed, the fault names the killed rank."""
        # read after its state, because a rank writes its fault before it closes
        left = self._control.page(rank).fault()
        if left is not None:
            return self._adopt(rank, left)
        closed = self._control.page(rank).state == RankState.CLOSED
        killed = self._killed() if closed else None
        if killed is not None:  # the rank that closed has noticed the death, in another group or before this rank did
            return self.died(killed)
        what = "closed the communicator" if closed else f"(pid {self._control.pid(rank)}) died"
        return self._blame(errors.PeerDied, rank, f"rank {rank} {what}; {self._last_call(rank)}")

    def _stalled(self, rank: int) -> Fault:
        return self._blame(
            errors.PeerStalled,
            rank,
            f"rank {rank} (pid {self._control.pid(rank)}) shows no sign of life for {self._beats[rank][1]:.1f} s "
            f"(limit {self._stall:g} s): stopped or starved; {self._last_call(rank)}",
        )

    def _late(self, late: list[int]) -> None:
        """Abort the group because a call's time is over."""
        control = self._control
        for rank in late:  # a stopped rank is named as such, even if the stall limit is longer
            if control.stopped(rank):
                who = f"rank {rank} (pid {control.pid(rank)})"
                text = f"{who} is stopped; timeout after {self._timeout:g} s; {self._last_call(rank)}"
                self._blame(errors.PeerStalled, rank, text)
                return
        text = "; ".join(f"rank {r} (alive) {self._last_call(r)}" for r in late)
        if not text:
            unseen = len(self._peers) + 1 < self._control.world_size
            text = "the other ranks cannot be seen from here" if unseen else "all peers have done their part"
        self._blame(
            errors.CollectiveTimeout,
            late[0] if late else self._control.rank,
            f"timeout after {self._timeout:g} s: {text}",
        )

    def _blame(self, kind: type[errors.TricommError], rank: int, text: str) -> Fault:
        control, running = self._control, self.in_flight
        own, message = control.page(control.rank).last(), running.message() if not running.in_epoch() else None
        if message is not None:
            doing = self._describe(message)
        elif isinstance(call := running.running(), UserCall) and call.name:
            doing = f"rank {control.rank} was in launch({call.name}); `tricomm check` names the line it waits at"
        elif own is not None:
            doing = f"rank {control.rank} was in {own.text()}"
        else:
            doing = f"rank {control.rank} made no call yet"
        return self.abort(Fault(kind.__name__, rank, control.page(control.rank).sequence(), f"{text}; {doing}"))

    def _last_call(self, rank: int) -> str:
        theirs = self._control.page(rank).last()
        mine = self._control.page(self._control.rank).sequence()
        if theirs is not None and theirs.sequence >= mine:
            return f"its last call is {theirs.text()}"
        last = "it has made no call" if theirs is None else f"it last called {theirs.text()}"
        return last if theirs is None else f"{last} and has not entered sequence {mine}"


def different(rank: int, mine: str, other: int, theirs: str) -> str:
    """The text of a fault: two ranks made different calls."""
    return (
        f"ranks made different calls: rank {rank} {mine}; rank {other} {theirs}; "
        "make the same call, with the same shape, on every rank"
    )
