"""A thread that moves messages while no thread waits for them: of isend and irecv, before their `wait`.

It runs in a process that has such messages. It never waits for a socket: a thread that does wait moves the messages of
its group with less delay, and must not find them taken.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

from tricomm import threads

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.01
_IDLE_SECONDS = 1.0  # without messages, after which it has to be woken: most messages have a thread that waits at once


class Moving(Protocol):
    """A transport with messages in flight."""

    def advance(self) -> bool:
        """Move what can be moved at once. Returns whether anything moved."""
        ...

    @property
    def unfinished(self) -> bool:
        """Whether messages are left."""
        ...

    watched: bool


_moving: weakref.WeakValueDictionary[int, Moving] = weakref.WeakValueDictionary()
_awake = threading.Event()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def watch(one: Moving) -> None:
    """Move the messages of `one` until none is left. Raises `ResourceError` if no thread can start."""
    global _thread
    if _thread is None:
        with _starting:
            if _thread is None:
                _thread = threads.start("tricomm-messages", _run)
    one.watched, _moving[id(one)] = True, one
    if not _awake.is_set():
        _awake.set()


def _run() -> None:
    pause, last = _LONGEST_PAUSE_SECONDS, time.monotonic()
    while True:
        time.sleep(pause)
        moved = _move()
        pause = _PAUSE_SECONDS if moved else min(2 * pause, _LONGEST_PAUSE_SECONDS)
        if _moving:
            last = time.monotonic()
        elif time.monotonic() - last > _IDLE_SECONDS:
            _awake.clear()
            if not _moving:
                _awake.wait()


def _move() -> bool:
    moved = False
    for one in threads.living(_moving):
        moved = one.advance() or moved
        if not one.unfinished:
            one.watched = False
            _moving.pop(id(one), None)
            if one.unfinished:  # a message was added meanwhile
                watch(one)
    return moved


def _in_forked_child() -> None:
    global _awake, _starting, _thread
    _moving.clear()
    _awake, _starting, _thread = threading.Event(), threading.Lock(), None


os.register_at_fork(after_in_child=_in_forked_child)
