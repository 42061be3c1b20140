"""The handles that c10d calls return, to Python callers and to C++ ones.

DDP's reducer waits in C++ for the futures of its buckets, and raises a RuntimeError with the text of a call's error. A
Python callback of the backward pass runs before the reducer's, and raises the error with its class.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.autograd import graph
from torch.futures import Future

from tricomm.c10d.call_futures import CallFuture, CallId, collect_all, settle
from tricomm.errors import CollectiveTimeout, InvalidArgument
from tricomm.store.tcp.waits import told

_UNSET = timedelta(0)
_LOOK_SECONDS = 1.0
log = logging.getLogger("tricomm")
_BACKWARD = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)


def limit_seconds(timeout: timedelta | None) -> float | None:
    """The timeout in seconds, or None if it is zero or negative, which means no limit in c10d."""
    if not isinstance(timeout, timedelta | None):
        raise InvalidArgument(f"timeout={timeout!r}: a datetime.timedelta is needed")
    return None if timeout is None or timeout <= _UNSET else timeout.total_seconds()


class Latch:
    """An event that any thread sets once. Unlike with `threading.Event`, an interrupted `wait` leaves no lock taken."""

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Wake all waiters. Called once."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the latch is open, for `seconds` at most; returns whether it is."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self.is_open:
            left = _LOOK_SECONDS if end is None else min(_LOOK_SECONDS, end - time.monotonic())
            if left <= 0:
                break
            if self._lock.acquire(timeout=left):
                self._lock.release()  # for the other waiters, which also check every second
        return self.is_open


def in_backward() -> bool:
    """True while autograd runs a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class _Promise:
    """A future that another thread may complete, once."""

    def __init__(self, future: Any, complete: Callable[[], None]) -> None:
        self.future = future
        self._complete = [complete]

    def keep(self) -> None:
        """Complete the future if it is not complete; any thread may call it."""
        try:
            complete = self._complete.pop()
        except IndexError:
            return
        complete()


class Handle(Work):
    """The common parts of all handles."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._result = result

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return bool(self.is_completed() and self.exception() is None)

    def exception(self) -> Any:
        return None

    def result(self) -> list[Any]:
        return self._result


class PendingWork(Handle):
    """The call `id`, which another thread runs.

    Dropping the handle is safe: the queue holds what the call needs.

    `interrupted(error)` is called if an exception of other code, such as Ctrl-C, ends a wait.
    """

    def __init__(self, id: CallId, what: str, result: list[Any], interrupted: Callable[[BaseException], None]) -> None:
        super().__init__(result)
        self.id, self.over = id, Latch()
        self._what, self._interrupted = what, interrupted
        self._error: BaseException | None = None
        self._finished = False
        self._end = [True]  # taken by the thread that finishes the call
        self._promises: dict[bool, _Promise] = {}

    def finish(self, error: BaseException | None = None) -> list[CallFuture]:
        """The call has completed, or failed with `error`; a second call is ignored. Returns the futures that have
        callbacks."""
        try:
            self._end.pop()
        except IndexError:
            return []
        self._error = error
        self._finished = True
        promises = list(self._promises.values())
        for promise in promises:
            try:
                promise.keep()
            except Exception:  # the user has completed it
                log.exception("the future of call %s could not be completed", self.id.name)
        self.over.open()
        futures = [promise.future for promise in promises]
        return [future for future in futures if isinstance(future, CallFuture) and future.has_callbacks]

    def forked(self, error: BaseException) -> None:
        """Called in a forked child, which has no thread for the call: a wait raises `error`."""
        self._error, self._finished = error, True
        self.over.open()

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Block until the call has run; raises the call's error, or `CollectiveTimeout` after `timeout`."""
        try:
            over = self.over.wait(limit_seconds(timeout))
        except InvalidArgument:  # the call goes on
            raise
        except BaseException as error:
            self._interrupted(error)
            raise
        if not over:
            late = CollectiveTimeout(f"{self._what}: timeout after {timeout.total_seconds():g} s of wait()")
            self.id.queue.recorder.name_in(late)
            raise late
        if self._error is not None:
            told(self._error)
            raise self._error
        return True

    def is_completed(self) -> bool:
        # A waiter of the future may return before the latch is open.
        return self.over.is_open or any(promise.future.done() for promise in list(self._promises.values()))

    def exception(self) -> Any:
        return self._error

    def get_future(self) -> Any:
        """Holds the call's list of output tensors, as every c10d backend's does.

        If the call fails, `wait()` and `value()` of the future raise the call's error. C++ code that takes the future
        (DDP's reducer) knows no Python errors: its future fails with a RuntimeError whose text has class and text of
        the call's error.
        """
        key = in_backward() and _called_by_autograd()
        promise = self._promises.get(key)
        if promise is None:
            promise = self._promises.setdefault(key, self._for_reducer() if key else self._for_python())
        if self._finished:
            promise.keep()
        return promise.future

    def _for_python(self) -> _Promise:
        future = CallFuture(self.id)
        return _Promise(future, lambda: future.settle(self._error, self._result))

    def _for_reducer(self) -> _Promise:
        trigger: Any = Future()
        return _Promise(_read_by_reducer(trigger), lambda: settle(trigger, self._error, self._result))


def failed(error: BaseException) -> Any:
    """A future that has failed with `error`; for the reducer if a backward pass runs on this thread."""
    future: Any = Future()
    failing = _read_by_reducer(future) if in_backward() else future
    settle(future, error, [])
    return failing


def _read_by_reducer(future: Any) -> Any:
    """A future that fails in C++ if `future` fails.

    `settle` makes the error the value of the future, which the reducer would take for its tensors. But an error that a
    callback of `then` raises is an error of the returned future in C++ as well.
    """
    return future.then(lambda done: done.value())


class FinishedWork(Handle):
    """A call that has completed on return (on the CPU), or is ordered on the caller's stream."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__(result)
        self._future: Any = None

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        if self._future is None:
            devices = [t.device for t in self._result[:1] if isinstance(t, torch.Tensor) and t.is_cuda]
            self._future = Future(devices=devices) if devices else Future()  # type: ignore[arg-type]
            self._future.set_result(self._result)
        return self._future


class CombinedWork(Handle):
    """One handle for several calls, without a result. None stands for a call without a handle: NCCL returns None for a
    synchronous call, for a call in a group, and for a group without calls."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__([])
        self._works = [work for work in works if work is not None]

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        for work in self._works:
            work.wait(timeout) if limit_seconds(timeout) else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def get_future(self) -> Any:
        return collect_all([work.get_future() for work in self._works])


def raise_in_backward(work: Any) -> None:
    """Make the running backward pass raise the error of `work`, if C++ code made the call; else do nothing.

    The reducer would wait for the call here. Python code waits for its calls itself.
    """
    if not _called_by_autograd():
        return
    # the pass is at its end (first pass of a static graph), where the reducer waits
    if torch._C._current_autograd_node() is None:
        work.wait()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)


def _called_by_autograd() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("tricomm.c10d"):
        frame = frame.f_back
    return frame is None or frame.f_code is _BACKWARD
