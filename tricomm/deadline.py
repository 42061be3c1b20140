"""Waits with a limit: a deadline that several waits share, and polling."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

_GROWTH = 1.3


class TimeSource(Protocol):
    """The two functions of the module `time` that a wait needs; a simulation has its own clock."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class Deadline:
    """A deadline `seconds` from now, by `time.monotonic`."""

    def __init__(self, seconds: float) -> None:
        self._began, self._end = time.monotonic(), time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def waited(self) -> float:
        """Seconds since the deadline was set."""
        return time.monotonic() - self._began

    def extend(self, seconds: float) -> None:
        """Extend to at least `seconds` from now."""
        self._end = max(self._end, time.monotonic() + seconds)


def poll(
    done: Callable[[], bool],
    seconds: float | None,
    pause: float,
    longest: float = 0.0,
    meanwhile: Callable[[], None] | None = None,
    clock: TimeSource = time,
) -> bool:
    """Whether `done` becomes true within `seconds` (None: without a limit).

    `done` is called at least once, then again after each pause of `pause` seconds; pauses grow up to `longest`. It is
    called once more when the time is up. `meanwhile` is called after each call of `done` that was not true. An
    exception from either ends the wait.
    """
    end = None if seconds is None else clock.monotonic() + seconds
    while not done():
        if meanwhile is not None:
            meanwhile()
        if end is not None and clock.monotonic() >= end:
            return False
        clock.sleep(pause)
        pause = max(pause, min(pause * _GROWTH, longest))
    return True
