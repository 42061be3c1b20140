"""The thread of a process that watches all of its communicators.

A group in which a call runs is checked every tick. The others are checked in rotation, a few per tick, so that hundreds
of idle groups cost little. When a process ends, all groups are checked at once. An error in checking a group affects
only that group.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tricomm import threads
from tricomm.deadline import Deadline, poll
from tricomm.store import process
from tricomm.store.control import Fault

TICK = 0.02
_LONGEST_TICK = 0.25
_BEAT_SECONDS = 0.1
_FEW = 4  # idle groups that are checked in a tick, at least
_TICKS = 25  # ticks within which each idle group is checked once
_STOP_SECONDS = 5.0


class Watchable(Protocol):
    """A group's monitor. `look` and `beat` are called on the watcher's thread and raise nothing."""

    fault: Fault | None
    stopped: bool
    looked: float

    def busy(self) -> bool:
        """Whether a call of this rank runs, or a kernel has reported something."""

    def beat(self) -> None:
        """Tell the peers that this process runs."""

    def look(self, tick: float) -> None:
        """Check the peers; `tick` seconds have passed since the last time."""


class Watcher:
    """The thread; it runs while there are monitors. The explorer replaces it and calls the monitors itself, in
    simulated time."""

    def __init__(self, ended: Callable[[], int] = process.ended) -> None:
        self._ended = ended
        self._watched: dict[int, Watchable] = {}
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._current: Watchable | None = None
        self._next = 0

    def add(self, monitor: Watchable) -> None:
        """Watch over `monitor` until it is discarded. Raises `ResourceError` if no thread can start."""
        monitor.looked = time.monotonic()
        with self._lock:
            self._watched[id(monitor)] = monitor
            if self._thread is None or not self._thread.is_alive():
                self._wake.clear()
                try:
                    self._thread = threads.start("tricomm-watcher", self._run)
                except BaseException:
                    del self._watched[id(monitor)]
                    raise

    def discard(self, monitor: Watchable) -> None:
        """Remove `monitor`; on return the thread does not access it any more. Idempotent. Removing the last one ends
        the thread."""
        monitor.stopped = True
        self._watched.pop(id(monitor), None)
        thread = self._thread
        if thread is threading.current_thread():
            if not self._watched:
                self._wake.set()
            return
        deadline = Deadline(_STOP_SECONDS)
        poll(lambda: self._current is not monitor, deadline.left, 1e-4)
        while not self._watched and thread is not None and thread.is_alive() and not deadline.passed:
            self._wake.set()
            thread.join(0.05)  # if another group begins meanwhile, the thread continues

    def _run(self) -> None:
        beaten, gone = 0.0, 0
        while not self._wake.wait(TICK) or not self._over():
            now = time.monotonic()
            everybody = list(self._watched.values())
            if now - beaten >= _BEAT_SECONDS:
                beaten = now
                for monitor in everybody:
                    self._at(monitor, lambda alive: alive.beat())
            before, gone = gone, self._ended()
            for monitor in everybody if gone != before else self._due(everybody):
                self._at(monitor, lambda due: due.look(self._tick(due)))

    def _over(self) -> bool:
        """Whether the thread ends now; the next group starts a new one."""
        with self._lock:
            self._wake.clear()
            if self._watched:
                return False
            self._thread = None
            return True

    def _due(self, everybody: list[Watchable]) -> list[Watchable]:
        busy = [monitor for monitor in everybody if monitor.busy()]
        count = min(len(everybody), max(_FEW, len(everybody) // _TICKS))
        first = self._next % max(1, len(everybody))
        self._next = first + count
        turn = everybody[first : first + count]
        turn += everybody[: count - len(turn)]
        return busy + [monitor for monitor in turn if monitor not in busy]

    def _tick(self, monitor: Watchable) -> float:
        now = time.monotonic()
        tick, monitor.looked = min(now - monitor.looked, _LONGEST_TICK), now
        return tick

    def _at(self, monitor: Watchable, action: Callable[[Watchable], None]) -> None:
        # before `stopped` is read: `discard` sets `stopped` and then waits until another monitor is current
        self._current = monitor
        try:
            if not monitor.stopped:
                action(monitor)
        finally:
            self._current = None


WATCHER = Watcher()


def _after_fork() -> None:
    """Called in a forked child: the thread was not copied, and the parent's groups are not the child's."""
    WATCHER.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
