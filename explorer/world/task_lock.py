"""A lock among the tasks of one rank's host code. They share a thread, so a lock of threads would not exclude them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import greenlet


class LockTurns(Protocol):
    """The part of the scheduler that a wait needs."""

    def wait(self, rank: int) -> None: ...

    def wake_hosts(self) -> None: ...

    def refuse_strangers(self, rank: int) -> None: ...

    def release(self, rank: int) -> Any: ...

    def acquire(self, rank: int, when: Any) -> None: ...


class TaskLock:
    """As `threading.RLock`, for the tasks of `rank`; `now` gives the time of the simulation in seconds."""

    def __init__(self, turns: LockTurns, rank: int, now: Callable[[], float]) -> None:
        self._turns, self._rank, self._now = turns, rank, now
        self._owner: greenlet.greenlet | None = None
        self._last: tuple[greenlet.greenlet, Any] | None = None  # the previous owner, and when it released the lock
        self._times = self._waiting = 0

    def _is_owned(self) -> bool:
        return self._owner is greenlet.getcurrent()

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        self._turns.refuse_strangers(self._rank)  # before the call is announced, or anything is queued
        end = self._now() + timeout if timeout >= 0 else None
        while self._owner is not None and not self._is_owned():
            if not blocking or (end is not None and self._now() >= end):
                return False
            self._waiting += 1
            try:
                self._turns.wait(self._rank)
            finally:
                self._waiting -= 1
        self._owner = here = greenlet.getcurrent()
        self._times += 1
        if self._times == 1 and self._last is not None and self._last[0] is not here:
            self._turns.acquire(self._rank, self._last[1])
        return True

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._times -= 1
        if not self._times:
            self._owner, self._last = None, (greenlet.getcurrent(), self._turns.release(self._rank))
            if self._waiting:
                self._turns.wake_hosts()
