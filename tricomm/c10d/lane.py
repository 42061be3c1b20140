"""The order of a group's calls on the CPU.

All ranks must hand their collectives to Gloo, or to the kernels, in the same order. A call that blocks runs in the
caller's thread where nothing is under way; every other one runs on a thread of the group, one after another. So
`async_op=True` never blocks, and groups that overlap may be used in different orders.

A future's callbacks belong to its call: what they call in turn (as PowerSGD's do) runs at once, before the calls that
are waiting, whether the callback runs on the group's thread or, as the call was over already, in the caller's. A
callback that does not end, for it waits for one of those, is left behind after a moment.
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
_PATIENCE_SECONDS = 1.0  # for callbacks, where calls are waiting behind them
_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


class Lane:
    """Runs one group's calls in the order in which they were made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], PendingWork] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()  # held while a call runs
        self._order = threading.Lock()  # held while a call is put in its place
        self._pending = 0
        self._server: threading.Thread | None = None  # runs the calls; callbacks too, and those make calls themselves
        self._served = 0
        self._callbacks = 0  # number of the call whose callbacks run now
        self._ended = threading.Event()
        self._closed = False
        _lanes.add(self)

    def run(self, action: Callable[[], None], what: str, result: list[Any], async_op: bool) -> Any:
        """Do `action` in its turn; returns a handle, finished already where the caller waits anyway."""
        with self._order:
            if self._closed:
                raise GroupAborted(f"{what}: the group was destroyed; make a new one")
            from_callback = self._server is threading.current_thread()
            inline = from_callback or not async_op and self._pending == 0 and self._turn.acquire(blocking=False)
            if not inline:
                work = PendingWork(what, result)
                self._pending += 1
                self._jobs.put((action, work))
                if self._server is None:
                    self._server = self._start(self._serve)
                    self._start(self._watch)
        if inline:
            if from_callback:
                self._turn.acquire()
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
            self._ended.set()
            self._jobs.put(None)
            server = self._server
        if server is not None and server is not threading.current_thread():
            server.join(_JOIN_SECONDS)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            action, work = job
            error = self._do(action)
            self._served += 1
            self._callbacks = self._served
            work.finish(error)
            with self._order:
                self._pending -= 1
                if self._server is not threading.current_thread():
                    return
                self._callbacks = 0
            del job, action, work, error  # a thread that waits must not keep the last call's tensors

    def _watch(self) -> None:
        """Take over from a server whose callbacks keep calls waiting for ever, or for so long that it may be that."""
        before = 0
        while not self._ended.wait(_PATIENCE_SECONDS):
            with self._order:
                now = self._callbacks
                if now and now == before and not self._jobs.empty() and not self._closed:
                    self._start(self._watch)
                    self._server, self._callbacks = threading.current_thread(), 0
                    break
                before = now
        else:
            return
        self._serve()

    def _start(self, body: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=body, name=f"tricomm-{self._name}", daemon=True)
        thread.start()
        return thread

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
