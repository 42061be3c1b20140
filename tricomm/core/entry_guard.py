"""The wrapper of every public call of a communicator: a guard against interrupts, which also sets the current device.

Python runs a signal's handler between any two of its instructions: Ctrl-C, or an exception that another handler
raises, may come after a lock is taken and before the `try` that gives it back. So no call relies on its own `finally`
alone. If anything but one of tricomm's own errors leaves a public call, the group is aborted and the other ranks are
told; and any exception that leaves the call releases the lock.
"""

from __future__ import annotations

import errno
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FrameType, FunctionType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from tricomm.errors import ResourceError, TricommError
from tricomm.store.bounded_store import first_line

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_codes: set[CodeType] = set()
# Of what the system refuses at a limit: descriptors, memory, threads, space.
_REFUSALS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.ENOBUFS}
# The call is on the line of the `try`: then even an exception at the first instruction is inside of it.
_METHOD = "_method if (gpu := self._gpu) is None or gpu.current_device() == gpu.index else gpu.under(_method)"
_SOURCE = """
def {name}({parameters}):
    try: return ({on_its_device})({arguments})
    except BaseException as error:
        self._guard.unwound(error)
        raise
"""


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
        """Give the lock back if this thread holds it, however often it has taken it."""
        while self.mine():
            self.release()


class Guard:
    """What a communicator does with an exception that leaves one of its calls.

    An exception that is not tricomm's own may have come at any instruction: it is unknown what this rank has told the
    others by then, so `interrupted` is called with it, which aborts the group.
    """

    def __init__(self, lock: CallLock, interrupted: Callable[[BaseException], None]) -> None:
        self._lock, self._interrupted = lock, interrupted

    def unwound(self, error: BaseException) -> None:
        """`error` leaves a guarded call; raises a `ResourceError` for what the system has refused."""
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
        # Not that frame's variables: they hold the exception, which holds the frame.
        while frame is not None and (frame := frame.f_back) is not None:
            if frame.f_code in _codes and frame.f_locals["self"]._guard is self:
                return True
        return False


def guarded(method: _Method) -> _Method:
    """`method` with the guard around it. Its object has `_guard`, which is told of every exception that leaves it, and
    `_gpu`, which is the current device inside, or None."""
    return cast(_Method, _surrounded(method, "self"))


def entry(method: Callable[Concatenate[Any, _P], _R], owner: str) -> Callable[Concatenate[Any, _P], _R]:
    """A guarded method of a facade: `method` of the collaborator that the facade has as its attribute `owner`.

    It calls the collaborator's method without another frame, and has its signature and docstring.
    """
    return cast(Callable[Concatenate[Any, _P], _R], _surrounded(method, f"self.{owner}"))


def fact(read: Callable[[Any], _R], meaning: str) -> _R:
    """A property of a facade, whose value `read` returns; the class annotates its type."""
    return cast(_R, property(read, doc=meaning))


def _surrounded(method: Any, owner: str) -> Callable[..., Any]:
    """The wrapper is made from the method's signature: one that takes any arguments would cost a small call 6 % more.
    A call whose arguments do not fit the signature is refused outside of the guard."""
    parameters, arguments, star = [], [], False
    several = bool(method.__code__.co_flags & inspect.CO_VARARGS)
    for parameter in inspect.signature(method).parameters.values():
        name = parameter.name
        by_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if by_keyword and not star:
            parameters.append("*")
        prefix = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        prefix = "**" if parameter.kind is parameter.VAR_KEYWORD else prefix
        star = star or by_keyword or prefix == "*"
        parameters.append(prefix + name + ("" if parameter.default is parameter.empty else "=None"))
        arguments.append(f"{name}={name}" if by_keyword and several else prefix + name)
    arguments[0] = owner
    source = _SOURCE.format(
        name=method.__name__, parameters=", ".join(parameters), on_its_device=_METHOD, arguments=", ".join(arguments)
    )
    names: dict[str, Any] = {"_method": method if several else _positional(method)}
    exec(compile(source, f"<guarded {method.__qualname__}>", "exec"), names)
    made = names[method.__name__]
    functools.update_wrapper(made, method)
    made.__defaults__ = method.__defaults__
    made.__kwdefaults__ = method.__kwdefaults__
    _codes.add(made.__code__)
    return cast(Callable[..., Any], made)


def _positional(method: Any) -> Callable[..., Any]:
    """`method`, taking its keyword-only arguments by position, behind the others: a call by position is quicker."""
    code = method.__code__
    code = code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0)
    return FunctionType(code, method.__globals__, method.__name__, None, method.__closure__)


def by_hand(method: _Method) -> _Method:
    """Count `method`, which has a guard of its own, among the guarded ones."""
    _codes.add(cast(Any, method).__code__)
    return method


def set_up(make: Callable[[ExitStack], None]) -> None:
    """Run `make`; if it raises, undo what it has put on the stack. Raises a `ResourceError` for what the system has
    refused."""
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

    A signal's handler may raise any other `OSError`, for example a `TimeoutError`: it stays as it is.
    """
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    refused = isinstance(error, OSError) and error.errno in _REFUSALS
    if (refused or memory) and not isinstance(error, TricommError):
        # Without a variable for the new error: it would refer to this frame, and the frame to it and to all memory.
        raise ResourceError(f"{first_line(error)}: a limit of this process or of the machine is reached") from error
