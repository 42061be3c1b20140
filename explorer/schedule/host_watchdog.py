"""Ends host code that blocks outside of tricomm: all ranks share one thread, so no other rank could wake it."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNAL = signal.SIGRTMAX if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
_GRACE = 0.25  # seconds in which an execution reaches its next step and ends there
_AGAIN = 1.0  # seconds between two signals, if code swallows the first


class Blocked(BaseException):
    """Raised in host code that blocks for too long. Not an Exception: user code must not swallow it."""


class OutOfTime(Blocked):
    """The time budget of all executions is over."""


class Watchdog:
    """A context manager that raises in the main thread: `Blocked` if `progress()` has not changed for `seconds`, and
    `OutOfTime` soon after `ends`, a time of the monotonic clock.

    It raises by a signal, which also interrupts sleeps and waits for locks. Other threads get no signals, so they have
    no watchdog.
    """

    def __init__(self, progress: Callable[[], Any], seconds: float, ends: float = math.inf) -> None:
        self._progress, self._seconds, self._ends = progress, seconds, ends
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._before: dict[int, Any] = {}
        self.interrupted = False  # by SIGINT, even if the user's code has caught the exception
        self._thread = threading.Thread(target=self._watch, name="tricomm-watchdog", daemon=True)
        self._usable = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Watchdog:
        if self._usable:
            self._before[_SIGNAL] = signal.signal(_SIGNAL, self._raise)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._usable:
            with self._lock:  # after this, no signal is sent
                self._over.set()
            self._thread.join()
            for number, handler in self._before.items():
                signal.signal(number, handler)
        if self.interrupted and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        raise KeyboardInterrupt

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._over.is_set():
            raise OutOfTime if time.monotonic() >= self._ends else Blocked

    def out_of_time(self) -> bool:
        """True after `ends`. From then on no signal is sent, because the caller ends the execution itself."""
        if time.monotonic() < self._ends:
            return False
        self._over.set()
        return True

    def _watch(self) -> None:
        main, last, since = threading.main_thread().ident, self._progress(), time.monotonic()
        late = self._ends + _GRACE
        while not self._over.wait(min(0.05, self._seconds / 4)):
            now = self._progress()
            if now != last:
                last, since = now, time.monotonic()
            if time.monotonic() > min(since + self._seconds, late):
                with self._lock:
                    if not self._over.is_set() and main is not None:
                        signal.pthread_kill(main, _SIGNAL)
                since = time.monotonic()
                late = max(late, since + _AGAIN)
