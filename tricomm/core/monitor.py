"""Watches over one communicator: sends heartbeats, reads the peers' and ends a call that cannot end by itself.

A kernel notes in the control page that it runs (`started` is the epoch it runs in, `ended` the one after it), so the
monitor sees eager calls and graph replays alike. A peer has done its part in the running call once its own `ended`
has moved past that epoch; its death does not matter to this call then.

Time is counted from look to look, and a look counts for a quarter of a second at most: a process that was itself
stopped, or starved, does not blame the others for it. All groups' monitors share one thread (`watcher`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch

from tricomm import errors
from tricomm.core.watcher import WATCHER, Watching
from tricomm.errors import GroupAborted, ResourceError
from tricomm.gpu import Gpu
from tricomm.kernels import layout
from tricomm.store.control import RING, ControlPage, Fault, RankState
from tricomm.store.cuda.cuda_driver import load_driver

_USER_SECONDS = 1.0
_COMPARE_SECONDS = 0.1  # a call that takes no longer is none that waits for another one
_STARTED, _ENDED, _STATUS = layout.STARTED, layout.ENDED, layout.STATUS
_MESSAGE, _MESSAGE_ENDED = layout.MESSAGE, layout.MESSAGE_ENDED
_SHARED = {"CollectiveMismatch", "PeerDied", "PeerStalled"}


class _UserCall:
    """A kernel that reports nothing itself: in flight until its `event`, if it has one, has passed."""

    event: Any = None


class FallbackBackend(Protocol):
    """A backend that moves data beside the kernels (NCCL): asked for its errors, and aborted with the group."""

    def error(self) -> str | None: ...
    def abort(self) -> None: ...


class Monitor:
    """Turns a dead, stopped, late or diverging peer into a named fault.

    `control` is the group's control page; `timeout` and `stall_timeout` are in seconds. `fault` is None until the
    group is aborted; the first fault stays. `lost` is a rank that a call would wait for in vain: its process ended, or
    it closed the group. `describers` has, by the code that a kernel reports in the status word, the fault that it
    means, of the peer and the number in the report; the parts that have such kernels add to it before `start`, and
    `stop` forgets them. `waited` has, by peer, for how many seconds calls that it had not entered waited for it.
    """

    def __init__(
        self, control: ControlPage, timeout: float, stall_timeout: float, watcher: Watching = WATCHER
    ) -> None:  # fmt: skip
        self.fault: Fault | None = None
        self.lost: int | None = None
        self.describers: dict[int, Callable[[int, int], Fault]] = {}
        self.waited = {r: 0.0 for r in range(control.world_size) if r != control.rank}
        self._control, self._watcher = control, watcher
        self._timeout = timeout
        self._stall = stall_timeout
        self._words = control.words()
        self._peers = {r: control.peer_words(r) for r in control.peers}
        self._backend: FallbackBackend | None = None
        self._lock = threading.RLock()  # a signal handler may abort the group while this thread does
        self._spread = False
        self.stopped, self.looked = False, 0.0  # the watcher's
        self._running: object = None
        self._elapsed = 0.0
        self._beats: dict[int, tuple[int, float]] = {}
        self._absent: dict[int, float] = {}
        self._user_calls: list[_UserCall] = []
        self._relaxed = False
        self._describe: Callable[[int], str] = str
        self._flags = memoryview(self._words)  # type: ignore[arg-type]  # reads faster than an array

    def start(self, describe: Callable[[int], str]) -> None:
        """Begin to watch. `describe` says what a message waits for, by its number."""
        self._describe = describe
        self._watcher.add(self)

    def watch(self, backend: FallbackBackend) -> None:
        """From now on ask `backend` for its errors too, and abort it with the group."""
        self._backend = backend

    def stop(self) -> None:
        """End the watch; on return nothing looks at the group any more. Idempotent."""
        self._watcher.discard(self)
        # Views keep a mapping alive, and the group and its monitor refer to each other: both end here.
        self._words, self._peers = np.zeros(layout.MESSAGE_ENDED + 1, np.int64), {}
        self._flags = memoryview(self._words)  # type: ignore[arg-type]
        self.describers.clear()
        self._describe = str

    def abort(self, fault: Fault) -> Fault:
        """Record `fault` unless there is one already, tell the peers, and make the kernels leave. Returns the first."""
        with self._lock:
            if self.fault is None:
                self.fault = fault
            if not self._spread:  # an interrupt may have stopped the first attempt half-way; each step can be repeated
                self._words[layout.ABORT] = 1
                self._control.raise_fault(self.fault)
                self._control.set_state(RankState.ABORTED)
                self._spread = True
                if self._backend is not None:  # on a thread of its own, because NCCL does not say how long it takes
                    threading.Thread(target=self._backend.abort, name="tricomm-abort", daemon=True).start()
            return self.fault

    def diagnose(self) -> None:
        """Abort the group for what a kernel has reported in the status word, if it has."""
        status = int(self._words[_STATUS])
        describe = self.describers.get(status & 0xFF)
        if describe is not None:
            self.abort(describe((status >> 8) & 0xFF, (status >> 32) & 0xFFFFFFFF))

    @contextmanager
    def user_call(self, gpu: Gpu | None) -> Iterator[None]:
        """While a user's own kernel runs; such a kernel moves no epoch. On a GPU that is until its event has passed."""
        token = _UserCall()
        self._user_calls.append(token)
        try:
            yield
            if gpu is not None and not gpu.capturing():
                token.event = gpu.recorded()  # only now: one that is not recorded yet counts as passed
        finally:
            if token.event is None:
                self._user_calls.remove(token)

    def running(self) -> object:
        """What this rank runs: the epoch of a kernel, a message, a user's call, or None.

        Nothing that is queued behind a kernel counts while that runs.
        """
        for past in list(self._user_calls):
            if past.event is not None and self._passed(past.event):
                self._user_calls.remove(past)
        if self._in_epoch():
            return int(self._words[layout.STARTED])
        message = self.message()
        if message is not None:
            return "message", message
        return next(iter(list(self._user_calls)), None)  # calls end in other threads

    def _passed(self, event: torch.cuda.Event) -> bool:
        if not self._relaxed:  # or a look at an event would end another thread's capture of a graph
            self._relaxed = True
            with suppress(ResourceError):
                load_driver().relax_capture()
        return bool(event.query())

    def message(self) -> int | None:
        """Number of the message that runs."""
        number = int(self._words[layout.MESSAGE])
        return number if number != int(self._words[layout.MESSAGE_ENDED]) else None

    def _in_epoch(self) -> bool:
        started = int(self._words[layout.STARTED])
        return started != 0 and started == int(self._words[layout.ENDED])

    def unfinished(self) -> list[int]:
        """Ranks that have not done their part in the running call. Nothing is known about a user's own kernel."""
        if self._in_epoch():
            started = int(self._words[layout.STARTED])
            return [r for r, words in self._peers.items() if not _past(words[layout.ENDED], started)]
        peer = int(self._words[layout.MESSAGE_PEER]) if self.message() is not None else -1
        return [r for r in self._peers if peer in (-1, r)]

    def _gone(self, rank: int) -> bool:
        return self._control.state(rank) == RankState.CLOSED or not self._control.alive(rank)

    def busy(self) -> bool:
        """Whether a call of this rank runs, or a kernel has reported something. Costs nearly nothing."""
        flags = self._flags
        return bool(
            flags[_STARTED] == flags[_ENDED]
            or flags[_MESSAGE] != flags[_MESSAGE_ENDED]
            or flags[_STATUS]
            or self._user_calls
            or self._running is not None
        )

    def beat(self) -> None:
        """Tell the peers that this process runs; does nothing if the group is being closed."""
        with suppress(GroupAborted):
            self._control.beat()

    def look(self, tick: float) -> None:
        """Look at the peers, `tick` seconds after the last look. An error in it costs this group only."""
        if self.fault is not None:
            return
        try:
            self._look(tick)
        except Exception as error:  # a monitor that failed silently would let the next call hang
            text = f"rank {self._control.rank}'s monitor failed: {type(error).__name__}: {error}"
            with suppress(GroupAborted):
                self.abort(Fault(errors.GroupAborted.__name__, self._control.rank, 0, text))

    def _look(self, tick: float) -> None:
        self._count(tick)
        self.lost = next((r for r in self._peers if self._gone(r)), None)
        if int(self._words[layout.STATUS]):
            self.diagnose()
            return
        for rank in self._peers:
            fault = self._control.fault(rank)
            if fault is not None:
                self._adopt(rank, fault)
                return
        error = self._backend.error() if self._backend is not None else None
        if error is not None:
            self._blame(errors.GroupAborted, self._control.rank, error)
            return
        if self._running is None:
            return
        if self._elapsed > _COMPARE_SECONDS and self._diverging():
            return
        self._wait_for(tick)
        late = self.unfinished()
        for rank in late:
            if self._gone(rank):
                if self._needs(rank):
                    self.died(rank)
                    return
            elif min(self._elapsed, self._beats[rank][1]) > self._stall:
                self._stalled(rank)
                return
        if self._elapsed > self._timeout:
            self._late(late)

    def _diverging(self) -> bool:
        """Compare what this rank called with what the others did, for kernels and NCCL do not meet in any mailbox."""
        control = self._control
        for rank in self._peers:
            last = min(control.sequence(control.rank), control.sequence(rank))
            for sequence in range(last, max(0, last - RING), -1):
                mine, theirs = control.called(control.rank, sequence), control.called(rank, sequence)
                if mine is not None and theirs is not None and mine.fingerprint != theirs.fingerprint:
                    text = different(control.rank, mine.text(), rank, theirs.text())
                    self.abort(Fault(errors.CollectiveMismatch.__name__, rank, sequence, text))
                    return True
        return False

    def _wait_for(self, tick: float) -> None:
        """Add the tick to the peers that have not entered the call that this rank is in."""
        if self._elapsed and self._in_epoch():
            started = int(self._words[layout.STARTED])
            for rank, words in self._peers.items():
                if not _entered(int(words[layout.STARTED]), started):
                    self.waited[rank] += tick

    def _needs(self, rank: int) -> bool:
        """True if the running call waits for a rank that is gone. Asked after it has gone, because it may have done its
        part just before. A message may have been sent before, and a user's kernel may not need that rank at all, so
        they get a second to end by themselves; a message from any rank can end as long as one peer stays."""
        if self._in_epoch():
            return rank in self.unfinished()
        from_any = self.message() is not None and int(self._words[layout.MESSAGE_PEER]) < 0
        leaver = self._control.state(rank) == RankState.CLOSED
        needed = list(self._peers) if from_any and leaver else [rank]
        return min(self._elapsed, *(self._absent.get(r, 0.0) for r in needed)) > _USER_SECONDS

    def _count(self, tick: float) -> None:
        """Add a tick to the age of all that has not changed since the last one."""
        running = self.running()
        self._elapsed = self._elapsed + tick if running is not None and running == self._running else 0.0
        self._running = running
        for rank in self._peers:
            beat = self._control.heartbeat(rank)
            before, age = self._beats.get(rank, (beat, 0.0))
            self._beats[rank] = (beat, age + tick if beat == before else 0.0)
            self._absent[rank] = self._absent.get(rank, 0.0) + tick if self._gone(rank) else 0.0

    def _adopt(self, rank: int, fault: Fault) -> Fault:
        kind = fault.kind if fault.kind in _SHARED else errors.GroupAborted.__name__
        text = fault.text if fault.kind in _SHARED else f"rank {rank} aborted the group: {fault.text}"
        return self.abort(Fault(kind, fault.culprit, fault.sequence, text))

    def died(self, rank: int) -> Fault:
        """Abort the group because `rank` is gone; for the reason that it has left, if it has."""
        left = self._control.fault(rank)  # after its state: a rank writes its reason before it closes
        if left is not None:
            return self._adopt(rank, left)
        closed = self._control.state(rank) == RankState.CLOSED
        what = "closed the communicator" if closed else f"(pid {self._control.pid(rank)}) died"
        return self._blame(errors.PeerDied, rank, f"rank {rank} {what}; {self._last_call(rank)}")

    def _stalled(self, rank: int) -> Fault:
        return self._blame(
            errors.PeerStalled,
            rank,
            f"rank {rank} (pid {self._control.pid(rank)}) shows no sign of life for {self._beats[rank][1]:.1f} s "
            f"(limit {self._stall:g} s): stopped or starved; {self._last_call(rank)}",
        )

    def _late(self, late: list[int]) -> Fault:
        control = self._control
        for rank in late:  # a stopped rank is named as such, even if the stall limit is longer
            if control.stopped(rank):
                who = f"rank {rank} (pid {control.pid(rank)})"
                text = f"{who} is stopped; timeout after {self._timeout:g} s; {self._last_call(rank)}"
                return self._blame(errors.PeerStalled, rank, text)
        text = "; ".join(f"rank {r} (alive) {self._last_call(r)}" for r in late)
        if not text:
            unseen = len(self._peers) + 1 < self._control.world_size
            text = "the other ranks cannot be seen from here" if unseen else "all peers have done their part"
        return self._blame(
            errors.CollectiveTimeout,
            late[0] if late else self._control.rank,
            f"timeout after {self._timeout:g} s: {text}",
        )

    def _blame(self, kind: type[errors.TricommError], rank: int, text: str) -> Fault:
        control = self._control
        own, message = control.last(control.rank), self.message() if not self._in_epoch() else None
        if message is not None:
            doing = self._describe(message)
        elif own is not None:
            doing = f"rank {control.rank} was in {own.text()}"
        else:
            doing = f"rank {control.rank} made no call yet"
        return self.abort(Fault(kind.__name__, rank, control.sequence(control.rank), f"{text}; {doing}"))

    def _last_call(self, rank: int) -> str:
        theirs = self._control.last(rank)
        mine = self._control.sequence(self._control.rank)
        if theirs is None:
            return "it has made no call"
        if theirs.sequence < mine:
            return f"it last called {theirs.text()} and has not entered sequence {mine}"
        return f"its last call is {theirs.text()}"


def different(rank: int, mine: str, other: int, theirs: str) -> str:
    """That two ranks made different calls, in words."""
    return (
        f"ranks made different calls: rank {rank} {mine}; rank {other} {theirs}; "
        "make the same call, with the same shape, on every rank"
    )


def _past(ended: int, started: int) -> bool:
    """True if a rank whose last call ended before epoch `ended` has left epoch `started` behind.

    Not the same as `ended != started`: a peer may be killed in the call before the one that this rank is in. Epochs
    wrap at 2^32, and ranks are never far apart.
    """
    return 0 < (int(ended) - started) % layout.EPOCH_LIMIT < layout.EPOCH_LIMIT // 2


def _entered(theirs: int, started: int) -> bool:
    """True if a rank whose latest call is of epoch `theirs` (0: it made none) has reached epoch `started`."""
    return theirs != 0 and (theirs - started) % layout.EPOCH_LIMIT < layout.EPOCH_LIMIT // 2
