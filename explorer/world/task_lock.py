"""The lock of one rank's calls. Tasks share a thread, so a lock of threads would not tell them apart."""

from __future__ import annotations

from typing import Protocol

import greenlet


class LockTurns(Protocol):
    """The functions of the scheduler that a lock needs."""

    def refuse_strangers(self, rank: int) -> None: ...


class TaskLock:
    """As `threading.RLock`, but only for the host code of `rank`."""

    def __init__(self, turns: LockTurns, rank: int) -> None:
        self._turns, self._rank = turns, rank
        self._owner: greenlet.greenlet | None = None
        self._times = 0

    def _is_owned(self) -> bool:
        return self._owner is greenlet.getcurrent()

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        self._turns.refuse_strangers(self._rank)  # before the call is announced and before anything is enqueued
        if self._owner is not None and not self._is_owned():  # when a task ends that did not release it
            return False
        self._owner = greenlet.getcurrent()
        self._times += 1
        return True

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._times -= 1
        if not self._times:
            self._owner = None
