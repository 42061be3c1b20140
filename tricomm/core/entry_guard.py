"""The wrapper of every public call of a communicator: a guard against interrupts, which also sets the current device.

Python runs signal handlers between any two instructions: Ctrl-C, or an exception of another handler, may come after a
lock is taken and before the `try` that releases it. So a call's own `finally` is not enough. If an exception that is
not a `TricommError` leaves a public call, the group is aborted and the other ranks are told; and any exception that
leaves the call releases the lock.
"""

from __future__ import annotations

import errno
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch

from tricomm.errors import ResourceError, TricommError
from tricomm.gpu import Gpu
from tricomm.store.bounded_store import first_line

_Method = TypeVar("_Method", bound=Callable[..., Any])
_codes: set[CodeType] = set()
# errno of a limit: descriptors, memory, threads, space
_REFUSALS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.ENOBUFS}


class CallLock:
    """The lock of a communicator's calls, which knows whether this thread holds it, even from an interrupted call.

    `lock` is a `threading.RLock`, or its counterpart among the tasks of a simulation.
    """

    __slots__ = ("acquire", "mine", "release")

    def __init__(self, lock: Any = None) -> None:
        lock = lock or threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release
        self.mine: Callable[[], bool] = lock._is_owned

    def release_all(self) -> None:
        """Release the lock if this thread holds it, even if it was taken several times."""
        while self.mine():
            self.release()


class Guard:
    """Handles the exceptions that leave a communicator's calls.

    An exception that is not a `TricommError` may be raised at any instruction, even after this rank has announced the
    call to its peers. So `interrupted` is called with it, which aborts the group.
    """

    def __init__(self, lock: CallLock, interrupted: Callable[[BaseException], None]) -> None:
        self._lock, self._interrupted = lock, interrupted

    def unwound(self, error: BaseException) -> None:
        """Called when `error` leaves a guarded call; raises a `ResourceError` if it says that the system refused a
        resource."""
        try:
            if not isinstance(error, TricommError):
                self._interrupted(error)
        finally:
            if not self._nested():
                self._lock.release_all()
        name_refusal(error)

    def _nested(self) -> bool:
        """True if the guarded call that is being left was made inside another one of the same communicator, by this
        thread: by a signal handler or a destructor."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code not in _codes:
            frame = frame.f_back
        # Without reading that frame's variables: they refer to the exception, which refers to the frame.
        while frame is not None and (frame := frame.f_back) is not None:
            if frame.f_code in _codes and frame.f_locals["self"]._guard is self:
                return True
        return False


def entry(method: _Method) -> _Method:
    """Marks a public method whose `except` clause calls `Guard.unwound`. Its object has `_guard`.

    The clause is written out where every microsecond counts; elsewhere `guarded` adds it.
    """
    _codes.add(cast(Any, method).__code__)
    return method


def guarded(method: _Method) -> _Method:
    """`method` with the guard around it. Its object has `_guard`, which gets every exception that leaves the method,
    and `_gpu`, the current device inside it, or None."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **keywords: Any) -> Any:
        try:
            return on_device(self._gpu, method)(self, *args, **keywords)
        except BaseException as error:
            if not isinstance(error, TypeError) or _fit(method, self, *args, **keywords):
                self._guard.unwound(error)
            raise

    _codes.add(cast(Any, call).__code__)
    return cast(_Method, call)


def on_device(gpu: Gpu | None, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, run with `gpu` as the current device."""
    return method if gpu is None or gpu.current_device() == gpu.index else gpu.under(method)


def _fit(method: Callable[..., Any], *args: Any, **keywords: Any) -> bool:
    """Whether the arguments fit the signature; if not, the call has not begun."""
    try:
        inspect.signature(method).bind(*args, **keywords)
    except TypeError:
        return False
    return True


def set_up(make: Callable[[ExitStack], None]) -> None:
    """Run `make`; if it raises, undo the steps that it has put on the stack. Raises a `ResourceError` if the system
    refused a resource."""
    undo = ExitStack()
    try:
        _named(make, undo)  # noqa: E701
    except BaseException as error:
        undo.__exit__(type(error), error, error.__traceback__)
        raise


def _named(make: Callable[[ExitStack], None], undo: ExitStack) -> None:
    try:
        make(undo)  # noqa: E701
    except Exception as error:
        name_refusal(error)
        raise


def name_refusal(error: BaseException) -> None:
    """Raises `ResourceError` if `error` says that the system or torch's allocator refuses something.

    Any other `OSError`, for example a `TimeoutError`, may be from a signal handler and is raised unchanged.
    """
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    refused = isinstance(error, OSError) and error.errno in _REFUSALS
    if (refused or memory) and not isinstance(error, TricommError):
        # No variable for the new error: it would refer to this frame, and the frame to it and to all memory.
        raise ResourceError(f"{first_line(error)}: a limit of this process or of the machine is reached") from error
