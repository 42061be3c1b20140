"""The threads that serve the connections of a process's groups: one watches waits, and helpers wait.

The main thread's waits, and those for sends and for messages from any rank, take a helper each. A helper's wait can be
left behind.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

from tricomm import threads
from tricomm.c10d.gloo_faults import Connections, Wait

_TICK = 0.05  # seconds between two looks at the waits under way
_SPARE = 2  # helpers that are kept although they have nothing to do

_waits: set[Wait] = set()
_awake = threading.Event()
_starting = threading.Lock()
_watcher: threading.Thread | None = None
_helpers: list[queue.SimpleQueue[HelperTask]] = []  # of those that have nothing to do


class HelperTask:
    """An action that a helper thread runs; `wait` may be interrupted by a signal's handler, the action is not.

    The constructor raises `ResourceError` if no thread can start."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._running = threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None
        try:
            jobs = _helpers.pop()
        except IndexError:
            jobs = queue.SimpleQueue()
            threads.start("tricomm-gloo-wait", _help, jobs)
        jobs.put(self)

    def run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._error = error
        self._running.release()

    def wait(self, seconds: float = -1.0) -> bool:
        """Wait until it has run, for `seconds` at most; returns whether it has."""
        if not self._running.acquire(timeout=seconds):
            return False
        self._running.release()
        return True

    def result(self) -> None:
        """Raises the exception that the action has ended with, if any."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def watch(waiting: Wait) -> None:
    """Look at `waiting` from now on. Raises `ResourceError` if no thread can start."""
    global _watcher
    if _watcher is None:
        with _starting:
            if _watcher is None:
                _watcher = threads.start("tricomm-gloo-watch", _watch)
    _waits.add(waiting)
    if not _awake.is_set():
        _awake.set()


unwatch = _waits.discard


def wake(transport: Connections) -> None:
    """Tell the waits on `transport` that its connections are shut down."""
    for waiting in list(_waits):
        if waiting.transport is transport:
            waiting.wake()


def _help(jobs: queue.SimpleQueue[HelperTask]) -> None:
    while True:
        job = jobs.get()
        job.run()
        del job
        if len(_helpers) >= _SPARE:  # the threads of a busy moment are not kept for good
            return
        _helpers.append(jobs)


def _watch() -> None:
    last = time.monotonic()
    while True:
        if not _waits:
            _awake.clear()
            if not _waits:
                _awake.wait()
                last = time.monotonic()
        time.sleep(_TICK)
        now = time.monotonic()
        # If this process itself was stopped, it has seen nothing meanwhile.
        elapsed, last = min(now - last, 4 * _TICK), now
        for waiting in list(_waits):
            try:
                waiting.look(elapsed)
            except Exception as error:  # a wait that is not watched might never end
                waiting.failed(-1, error)
                waiting.transport.shut_down()


def _in_forked_child() -> None:
    global _awake, _starting, _watcher
    _waits.clear()
    _helpers.clear()
    _awake, _starting, _watcher = threading.Event(), threading.Lock(), None


os.register_at_fork(after_in_child=_in_forked_child)
