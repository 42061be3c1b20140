"""Handles: what a c10d call returns, to Python callers and to C++ ones (DDP's reducer reads the future)."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from tricomm.errors import CollectiveTimeout

_UNSET = timedelta(0)


def bounded(timeout: timedelta | None) -> float | None:
    """Seconds, or None where no limit was given: c10d says that with zero or a negative number."""
    return None if timeout is None or timeout <= _UNSET else timeout.total_seconds()


class PendingWork(Work):
    """A call that a lane runs. Whoever drops it loses nothing: the lane holds what the call needs until it has run."""

    def __init__(self, what: str, result: list[Any]) -> None:
        super().__init__()
        self._what, self._result = what, result
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: Any = Future()
        done = (
            self._done
        )  # first of the callbacks: whoever waits finds the future done, and waits for no other callback
        self._future.add_done_callback(lambda _: done.set())

    def finish(self, error: BaseException | None = None) -> None:
        """By the lane, once: the call has run, or has failed with `error`."""
        self._error = error
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Block until the call has run; raises what it failed with, `CollectiveTimeout` after `timeout`."""
        if not self._done.wait(bounded(timeout)):
            raise CollectiveTimeout(f"{self._what}: timeout after {timeout.total_seconds():g} s of wait()")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> Any:
        """Holds the call's list of output tensors, as every c10d backend's does."""
        return self._future


class FinishedWork(Work):
    """A call that has run when it returned: on the CPU, or ordered on the caller's own stream."""

    def __init__(self, result: list[Any], future: Any = None) -> None:
        super().__init__()
        self._result, self._future = result, future

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> Any:
        if self._future is None:
            devices = [t.device for t in self._result[:1] if isinstance(t, torch.Tensor) and t.is_cuda]
            self._future = Future(devices=devices) if devices else Future()  # type: ignore[arg-type]
            self._future.set_result(self._result)
        return self._future


class AllOf(Work):
    """Several calls that are waited for together."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        for work in self._works:
            work.wait(timeout) if bounded(timeout) else work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])
