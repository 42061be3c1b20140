"""What surrounds every public call of a communicator: a guard for interrupts, and its device as the current one.

Python runs a signal's handler between any two of its instructions: Ctrl-C, or an exception that another handler
raises, may come between a lock's being taken and the `try` that gives it back. So no call relies on its own `finally`
alone. Whatever leaves a public call other than by one of tricomm's own errors gives the group up, and tells the other
ranks; and whatever leaves it gives the lock back.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])
_codes: set[CodeType] = set()
# On one line, because then even an exception at the first instruction is inside the `try`.
_SOURCE = """
def {name}({parameters}):
    try: return (_method if (gpu := self._gpu) is None or not gpu.elsewhere() else gpu.under(_method))({arguments})
    except BaseException as error:
        self._unwound(error)
        raise
"""


class Device(Protocol):
    """The GPU of an object with guarded methods."""

    def elsewhere(self) -> bool:
        """Whether another device is this thread's current one."""

    def under(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, with this device the current one while it runs."""


class Guarded(Protocol):
    """A class with guarded methods. `_unwound` is called with every exception that leaves one; `_gpu`, if there is
    one, is the current device inside."""

    _gpu: Device | None

    def _unwound(self, error: BaseException) -> None: ...


class Turn:
    """The lock of a communicator's calls, which knows whether this thread holds it, even from an interrupted call."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release
        self.mine: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]

    def let_go(self) -> None:
        """Give the lock back if this thread holds it."""
        while self.mine():
            self.release()


def guarded(method: _Method) -> _Method:
    """Hand every exception that leaves `method` to the object's `_unwound`, then raise it.

    The wrapper is made from the method's signature: one that takes any arguments would cost a small call 6 % more.
    A call whose arguments do not fit the signature is refused outside of the guard.
    """
    parameters, arguments, star = [], [], False
    several = bool(cast(Any, method).__code__.co_flags & inspect.CO_VARARGS)
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
    source = _SOURCE.format(name=method.__name__, parameters=", ".join(parameters), arguments=", ".join(arguments))
    names: dict[str, Any] = {"_method": method if several else _positional(method)}
    exec(compile(source, f"<guarded {method.__qualname__}>", "exec"), names)
    made = names[method.__name__]
    functools.update_wrapper(made, method)
    made.__defaults__ = method.__defaults__
    made.__kwdefaults__ = method.__kwdefaults__
    _codes.add(made.__code__)
    return cast(_Method, made)


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
    """Run `make`; whatever leaves it undoes what it has put on the stack, and is raised."""
    undo = ExitStack()
    try: make(undo)  # noqa: E701  # fmt: skip
    except BaseException as error:
        undo.__exit__(type(error), error, error.__traceback__)
        raise


def inside(comm: object) -> bool:
    """True if the guarded call that is being left was made inside another one of `comm`, by this thread: by a signal
    handler or a destructor."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in _codes:
        frame = frame.f_back
    # Not that frame's variables: they hold the exception, which holds the frame.
    while frame is not None and (frame := frame.f_back) is not None:
        if frame.f_code in _codes:
            owner = frame.f_locals["self"]
            if getattr(owner, "_comm", owner) is comm:
                return True
    return False
