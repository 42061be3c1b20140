"""The handle of an asynchronous call, and the type of the methods that return one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import torch

from tricomm.core.entry_guard import Guard, guarded
from tricomm.core.faults import Faults
from tricomm.core.symmetric import Symmetric
from tricomm.deadline import poll
from tricomm.options import seconds

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Result = TypeVar("_Result", covariant=True)


class Completion:
    """The end of a GPU call, for one of its handles. The event also passes after a kernel that ended because of a
    fault, so the event alone does not show that the call has completed."""

    def __init__(self, faults: Faults, event: torch.cuda.Event) -> None:
        self.event = event
        self._faults, self._number = faults, next(faults.handles)
        self._completed = False

    def passed(self) -> bool:
        """Whether the call has completed, or has ended because of a fault."""
        passed = self._completed or bool(self.event.query())
        # checked after the event: a call that ended before a fault has completed
        if passed and not self._faults.known():
            self._completed = True
        return passed

    def check(self) -> None:
        """Raise the group's fault, unless it came after the call had completed, as far as that is known."""
        if not self._completed and self._number > self._faults.completed:
            self._faults.check()


class Work:
    """A collective in flight, returned with `async_op=True`. Dropping it is safe; the call continues."""

    def __init__(self, faults: Faults, guard: Guard, output: Any, event: torch.cuda.Event | None) -> None:
        self._faults, self._guard, self._gpu = faults, guard, faults.group.gpu
        self._output = output
        self._end = None if event is None else Completion(faults, event)
        self._captured = self._gpu is not None and self._gpu.capturing()

    def is_completed(self) -> bool:
        """True once the call has run, or if it was captured: a replay has no handle. Never blocks."""
        return self._end is None or self._captured or self._end.passed()

    @guarded
    def wait(self, timeout: float | None = None) -> Any:
        """Make the current stream wait for the call and return its output; on a CPU the call has completed already.

        With `timeout` (seconds) the host also waits: `CollectiveTimeout` if the call has not finished in time. Raises
        the group's fault (`PeerDied`, `PeerStalled`, `CollectiveMismatch`, ...) if there is one, except for a call that
        is known to have completed before it, from `is_completed` or `shrink`.
        """
        return self._wait_for(None if timeout is None else seconds(timeout, "timeout"))

    def _wait_for(self, timeout: float | None) -> Any:
        if self._end is not None and self._gpu is not None:
            if not self._captured or self._gpu.capturing():  # an event of a capture has no meaning outside of it
                self._end.event.wait(self._gpu.stream())
            if timeout is not None:
                self._wait_on_host(timeout)
            self._end.check()
        return self._output

    def result(self) -> Any:
        """The call's output (in place: the input)."""
        return self._output

    def _wait_on_host(self, timeout: float) -> None:
        clock = time if self._gpu is None else self._gpu.clock
        if not poll(self.is_completed, timeout, 5e-5, meanwhile=self._faults.check, clock=clock):
            raise self._faults.late(timeout, "the call has not finished")


class AsyncCall(Protocol[_P, _Result]):
    """A method that returns its result, or a `Work` if it is called with `async_op=True`.

    With a list it returns a list, with a symmetric handle as output that handle. Type checkers do not check the other
    arguments of a call with `async_op=True` or with a list.
    """

    @overload
    def __call__(self, *args: _P.args, **keywords: _P.kwargs) -> _Result: ...
    @overload
    def __call__(self, *args: Any, async_op: Literal[True], **keywords: Any) -> Work: ...
    @overload
    def __call__(self, x: Sequence[torch.Tensor], *args: Any, **keywords: Any) -> list[torch.Tensor]: ...
    @overload
    def __call__(self, x: torch.Tensor, out: Symmetric, **keywords: Any) -> Symmetric: ...
    @overload
    def __call__(self, x: Symmetric, *args: Any, **keywords: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, async_op: bool, **keywords: Any) -> Any: ...


def or_work(method: Callable[Concatenate[Any, _P], _T]) -> AsyncCall[_P, _T]:
    """`method`, with the types that type checkers and editors should see; its `async_op` is annotated as
    `Literal[False]`."""
    return cast(AsyncCall[_P, _T], method)
