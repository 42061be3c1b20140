"""The order of a group's calls on the CPU.

All ranks must hand their collectives to Gloo, or to the kernels, in the same order. A call that blocks runs in the
caller's thread where nothing is under way; every other one runs on a thread of the group, one after another. So
`async_op=True` never blocks, and groups that overlap may be used in different orders. Futures are completed outside of
that order: a `then` callback may make another call and wait for it, as PowerSGD's does.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tricomm.c10d.works import FinishedWork, PendingWork
from tricomm.errors import GroupAborted

_JOIN_SECONDS = 2.0
_MOST_THREADS = 8  # as deep may callbacks that wait for calls be nested
_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


class Lane:
    """Runs one group's calls in the order in which they were made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], PendingWork] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()  # held while a call runs
        self._order = threading.Lock()  # held while a call is put in its place
        self._serving = threading.Lock()  # held by the thread that waits for the next call, and runs it
        self._pending = 0
        self._free = 0  # threads that are not in somebody's callback
        self._threads: list[threading.Thread] = []
        self._closed = False
        _lanes.add(self)

    def run(self, action: Callable[[], None], what: str, result: list[Any], async_op: bool) -> Any:
        """Do `action` in its turn; returns a handle, finished already where the caller waits anyway."""
        with self._order:
            if self._closed:
                raise GroupAborted(f"{what}: the group was destroyed; make a new one")
            inline = not async_op and self._pending == 0 and self._turn.acquire(blocking=False)
            if not inline:
                work = PendingWork(what, result)
                self._pending += 1
                self._jobs.put((action, work))
                self._grow()
        if inline:
            try:
                action()
            finally:
                self._turn.release()
            return FinishedWork(result)
        if not async_op:
            work.wait()
        return work

    def close(self) -> None:
        """Take no more calls, and give those under way a moment to end. Idempotent."""
        with self._order:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def _grow(self) -> None:
        """Under `_order`: have a thread that is free, as long as there may be more."""
        if self._free == 0 and len(self._threads) < _MOST_THREADS:
            thread = threading.Thread(target=self._serve, name=f"tricomm-{self._name}", daemon=True)
            self._threads.append(thread)
            self._free += 1
            thread.start()

    def _serve(self) -> None:
        while True:
            with self._serving:
                job = self._jobs.get()
                if job is None:
                    self._jobs.put(None)  # for the next thread
                    return
                action, work = job
                error = self._do(action)
            with self._order:
                self._pending -= 1
                self._free -= 1
                if not self._closed:
                    self._grow()
            work.finish(error)
            del job, action, work, error  # a thread that waits must not keep the last call's tensors
            with self._order:
                self._free += 1

    def _do(self, action: Callable[[], None]) -> BaseException | None:
        with self._turn:
            try:
                action()
            except BaseException as error:
                return error
        return None


@atexit.register
def _close_all() -> None:
    # A daemon thread that comes back from C++ into a finalized interpreter would take the process down.
    for lane in list(_lanes):
        lane.close()
