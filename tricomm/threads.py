"""The library's threads: daemon threads, a pool of helpers, and a named error if the system refuses another one."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from tricomm.errors import InvalidArgument, ResourceError

T = TypeVar("T")
_SPARE = 2  # idle helpers that are kept

_helpers: list[queue.SimpleQueue[Callable[[], None]]] = []  # queues of idle helpers
_here = threading.local()
kept = threading.local()  # values that a thread keeps between calls; a helper only during one action


def start(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """Run `target(*args)` in a daemon thread called `name`.

    Raises `ResourceError` if no thread can start: at the limit of processes, or without memory for a stack.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise ResourceError(
            f"the thread {name} cannot start ({error}): raise the limit of processes (ulimit -u; the pids limit of a "
            "container), or end threads that are not needed"
        ) from error
    return thread


def refuse_handlers_call(what: str) -> None:
    """Raises `InvalidArgument` for a call inside another call of its group, in the same thread, which only a signal
    handler can make."""
    raise InvalidArgument(
        f"{what}: a signal's handler makes a call in the middle of another one; let it set a flag, and call afterwards"
    )


def living(registry: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """The objects of `registry` that are alive. Another thread may add one meanwhile, which `list(registry.values())`
    would not survive."""
    return [value for reference in registry.valuerefs() if (value := reference()) is not None]


def run_in_helper(action: Callable[[], None]) -> None:
    """Run `action` on a helper thread; a signal handler cannot interrupt it. Raises `ResourceError` if no thread can
    start."""
    try:
        actions = _helpers.pop()
    except IndexError:
        actions = queue.SimpleQueue()
        start("tricomm-helper", _help, actions)
    actions.put(action)


def is_helper() -> bool:
    """Whether this thread is a helper."""
    return getattr(_here, "helper", False)


def _help(actions: queue.SimpleQueue[Callable[[], None]]) -> None:
    _here.helper = True
    while True:
        action = actions.get()
        with suppress(BaseException):  # the action reports its errors itself
            action()
        del action
        kept.__dict__.clear()  # idle helpers hold no descriptors
        if len(_helpers) >= _SPARE:  # threads started at a peak end again
            return
        _helpers.append(actions)


def _in_forked_child() -> None:
    global kept
    _helpers.clear()
    kept = threading.local()


os.register_at_fork(after_in_child=_in_forked_child)
