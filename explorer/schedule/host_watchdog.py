"""Ends host code that blocks outside of tricomm: all ranks share one thread, so no other rank could wake it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNAL = signal.SIGRTMAX if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2


class Blocked(BaseException):
    """Raised in host code that blocks for too long. Not an Exception: user code must not swallow it."""


class Watchdog:
    """While open, raises `Blocked` in the main thread if `progress()` has not changed for `seconds`.

    A signal also interrupts sleeps and waits for locks. In another thread there are no signals, and no watchdog.
    """

    def __init__(self, progress: Callable[[], Any], seconds: float) -> None:
        self._progress, self._seconds = progress, seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._before: Any = None
        self._thread = threading.Thread(target=self._watch, name="tricomm-watchdog", daemon=True)
        self._usable = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Watchdog:
        if self._usable:
            self._before = signal.signal(_SIGNAL, self._raise)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._usable:
            with self._lock:  # from here on no signal is sent
                self._over.set()
            self._thread.join()
            signal.signal(_SIGNAL, self._before)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._over.is_set():
            raise Blocked

    def _watch(self) -> None:
        main, last, since = threading.main_thread().ident, self._progress(), time.monotonic()
        while not self._over.wait(min(0.05, self._seconds / 4)):
            now = self._progress()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > self._seconds:
                with self._lock:
                    if not self._over.is_set() and main is not None:
                        signal.pthread_kill(main, _SIGNAL)
                since = time.monotonic()
