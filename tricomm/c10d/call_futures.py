"""The futures of calls. Every callback knows its call, and its place among the call's callbacks.

The names of the calls that a callback makes contain both (`call_queue`), so they do not depend on when the callback
was attached, or on the thread that runs it.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.futures import Future

from tricomm.errors import InvalidArgument, ResourceError
from tricomm.store.tcp.waits import told
from tricomm.threads import run_in_helper

NAMELESS = "(?)"  # in the place of a callback that may make no calls
log = logging.getLogger("tricomm")
_here = threading.local()
# one object for each thread that runs calls or callbacks; the exit of the process waits for them
busy: set[object] = set()
_collect_all = torch._C._collect_all


@dataclass(eq=False)
class CallId:
    """A call of the group of `queue`. `name` is its name in the group, once it runs; `origin` is the callback that has
    made it, None for the program.

    Futures refer to this and not to the call's handle, because that refers to them: a reference cycle would keep the
    tensors until the garbage collector runs.
    """

    queue: Any
    origin: Origin | None
    name: str = ""


@dataclass(eq=False)
class Origin:
    """A callback of `call`, at `place` among the call's callbacks. `lines` has the lines of its calls by group."""

    call: CallId
    place: str

    def name_for(self, group: Any) -> str:
        """The callback's name in the group of the queue `group`. Raises `InvalidArgument` as `CallQueue.name_for`."""
        return f"{self.call.name}{self.call.queue.name_for(group)}/{self.place}"

    lines: dict[Any, Any] = field(default_factory=dict)  # by the group's queue


def current_origin() -> Origin | None:
    """The callback that this thread runs, if any."""
    return getattr(_here, "origin", None)


@contextmanager
def _running(origin: Origin) -> Iterator[None]:
    outer, _here.origin = current_origin(), origin
    try:
        yield
    finally:
        _here.origin = outer


class _Modes:
    """torch's thread-local modes of the thread that attaches a callback; the callback runs with them."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ]
        self._cache, self._device = torch.is_autocast_cache_enabled(), torch.get_default_device()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device, enabled, dtype in self._autocast:
                if enabled != torch.is_autocast_enabled(device) or dtype != torch.get_autocast_dtype(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled, self._cache))
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            yield


def _without_frames(error: BaseException) -> BaseException:
    """A copy of `error` and of its causes, without tracebacks; `error` if its class cannot be copied."""
    try:
        made: BaseException = copy.copy(error)
    except Exception:  # the constructor of a user's class may take other arguments than `args`
        return error
    if error.__cause__ is not None:
        made.__cause__ = _without_frames(error.__cause__)
    return made


class _Failure:
    """The value of a future that has failed. C++ code (DDP's reducer) prints it, Python code gets a copy of the error.

    The garbage collector does not see the references of a future. The frames of the call and of its waiters refer to
    the future, so a traceback in the error would keep them, with their tensors and descriptors, for ever.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = _without_frames(error)

    def __str__(self) -> str:
        return f"{type(self._error).__name__}: {self._error}"

    def tell(self) -> None:
        told(self._error)
        raise _without_frames(self._error)


def settle(future: Future[Any], error: BaseException | None, result: Any) -> None:
    """Complete torch's `future` with `result` or `error`."""
    if error is not None:
        future._set_unwrap_func(_Failure.tell)
        result = _Failure(error)
    Future.set_result(future, result)


@dataclass(eq=False)
class _Callback:
    origin: Origin
    modes: _Modes
    action: Callable[[], None]

    def run(self) -> None:
        try:
            with self.modes.entered(), _running(self.origin):
                self.action()
        except Exception:
            log.exception("a callback of call %s has failed", self.origin.call.name)


class CallFuture(Future[Any]):
    """The future of a call, or one that `then` or `collect_all` returned; each of its callbacks has a place.

    torch would run callbacks as part of completing the future. Here they run afterwards, so that another thread can
    first take over the line. A callback runs with torch's thread-local modes of the thread that attached it.
    """

    def __init__(self, call: CallId, place: str = "") -> None:
        super().__init__()
        self._call, self._place = call, place
        self._attached: defaultdict[Origin | None, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
        self._callbacks: deque[_Callback] = deque()

    def then(self, callback: Callable[[Any], Any]) -> CallFuture:
        """As torch's, except that an error of `callback` keeps its class."""
        place = self.next_place()
        child = CallFuture(self._call, place)
        self._attach(place, lambda: child.complete_by(lambda: callback(self)))
        return child

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self._attach(self.next_place(), lambda: callback(self))

    def set_result(self, result: Any) -> None:
        super().set_result(result)
        self.run_callbacks()

    def set_exception(self, result: Any) -> None:
        if not isinstance(result, BaseException):
            raise InvalidArgument(f"set_exception: an exception is needed, found {type(result).__name__}")
        self.settle(result, None)
        self.run_callbacks()

    def settle(self, error: BaseException | None, result: Any) -> None:
        """Complete the future without running its callbacks."""
        settle(self, error, result)

    def complete_by(self, call: Callable[[], Any]) -> None:
        """Complete the future with the result or the error of `call`."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as failure:
            error = failure
        self.settle(error, result)
        self.run_callbacks()
        if error is not None and not isinstance(error, Exception):
            raise error

    def next_place(self) -> str:
        """The place of the next callback: a number, prefixed with the place of this future if it has one.

        The code that made the call (a callback, or the program) needs no prefix. Other code that attaches callbacks has
        a prefix and a separate count, because the order in which several attach may differ between ranks.
        """
        by, who = current_origin(), ""
        if by is not self._call.origin:
            try:
                who = "(program)" if by is None else f"({by.name_for(self._call.queue)})"
            except InvalidArgument:
                who = NAMELESS
        return f"{self._place}.{who}{next(self._attached[by])}".lstrip(".")

    def combined(self, futures: list[Any]) -> CallFuture:
        """A future, at the next place of this one, whose value is `futures` once all of them are complete."""
        place = self.next_place()
        made = CallFuture(self._call, place)
        left = [True] * (len(futures) - 1)

        def one_more() -> None:
            try:
                left.pop()
            except IndexError:
                made.set_result(futures)

        for future in futures:
            if isinstance(future, CallFuture):
                future._attach(place, one_more)
            else:
                future.add_done_callback(lambda _: one_more())
        return made

    @property
    def has_callbacks(self) -> bool:
        return bool(self._callbacks)

    def run_callbacks(self) -> None:
        """Run the callbacks that no other thread has begun, each on a separate thread, because one may wait for
        another.

        The future is complete.
        """
        thread = object()
        busy.add(thread)
        try:
            while True:
                try:
                    callback = self._callbacks.popleft()
                except IndexError:
                    return
                if self._callbacks:
                    with suppress(ResourceError):  # if no thread can be started, they run here, one after another
                        run_in_helper(self.run_callbacks)
                callback.run()
        finally:
            busy.discard(thread)

    def _attach(self, place: str, action: Callable[[], None]) -> None:
        callback = _Callback(Origin(self._call, place), _Modes(), action)
        self._callbacks.append(callback)
        if self.done():
            with suppress(ValueError):  # then the thread that completed the future runs it
                self._callbacks.remove(callback)
                callback.run()


def collect_all(futures: list[Any]) -> Any:
    """As `torch.futures.collect_all`; if one of `futures` belongs to a call, the result has a place."""
    given = list(futures)
    first = next((future for future in given if isinstance(future, CallFuture)), None)
    if first is None or not all(isinstance(future, torch._C.Future) for future in given):
        return _collect_all(given)  # torch refuses anything that is no future
    return first.combined(given)
