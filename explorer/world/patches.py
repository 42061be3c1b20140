"""Replaces functions of other modules in the host code of a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_MISSING = object()


class Patches(Generic[_T]):
    """`table` has, for each (owner, name), a function that makes the replacement for a rank's host code from its `_T`.

    Executions may run in several threads at once. The first one changes the owners, the last one restores them. Outside
    of host code the owners' functions are used. A class is replaced by a class that calls the function, and that has
    objects with its name as `stands_for` as instances. A property is replaced by a property.
    """

    def __init__(self, table: Callable[[], Mapping[tuple[Any, str], Callable[[_T], Any]]]) -> None:
        self._table, self._thread, self._lock = table, threading.local(), threading.Lock()
        self._executions = 0
        self._real: list[tuple[Any, str, Any]] = []

    @contextmanager
    def installed(self, current: Callable[[], _T | None]) -> Iterator[None]:
        """A context manager that installs the patches. `current()` returns the state of the rank whose host code runs,
        or None."""
        before = getattr(self._thread, "current", None)
        self._change(1)
        self._thread.current = current
        try:
            yield
        finally:
            self._thread.current = before
            self._change(-1)

    def replacements(self) -> dict[int, Any]:
        """While installed: the functions that replace the owners' functions, by the ids of these."""
        return {id(real): getattr(owner, name) for owner, name, real in self._real if real is not _MISSING}

    def _change(self, by: int) -> None:
        with self._lock:
            self._executions += by
            if by > 0 and self._executions == 1:
                for (owner, name), simulated in self._table().items():
                    self._real.append((owner, name, vars(owner).get(name, _MISSING)))
                    setattr(owner, name, self._either(simulated, getattr(owner, name)))
            elif not self._executions:
                while self._real:
                    owner, name, real = self._real.pop()
                    delattr(owner, name) if real is _MISSING else setattr(owner, name, real)

    def _either(self, simulated: Callable[[_T], Any], real: Any) -> Any:
        own: Any = real.fget if isinstance(real, property) else real

        def either(*args: Any, **kwargs: Any) -> Any:
            current: Callable[[], _T | None] | None = getattr(self._thread, "current", None)
            state = None if current is None else current()
            return own(*args, **kwargs) if state is None else simulated(state)(*args, **kwargs)

        if isinstance(real, type):
            return _ClassStandin(real.__name__, (), {"real": real, "either": staticmethod(either)})
        return property(either) if isinstance(real, property) else either


class _ClassStandin(type):
    """A class in place of another one, `real`: annotations and `isinstance` need one."""

    real: type
    either: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.either(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real) or getattr(instance, "stands_for", None) == cls.__name__
