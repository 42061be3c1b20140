"""Global variables of a program's modules, kept apart for each rank, as separate processes would.

Each rank starts from the values before the execution: copies of lists, dicts and sets, and empty caches of functions
under `functools.cache`. Ranks share every other object, such as a class, until one of them assigns to its name.
"""

from __future__ import annotations

import copy
import functools
import sys
import sysconfig
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from triton.runtime.jit import KernelInterface

_CONTAINERS = (dict, list, set)
_LIBRARIES = sys.stdlib_module_names | {"cuda", "numpy", "torch", "triton", "tricomm"}
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


def modules_of(function: Callable[..., Any]) -> list[ModuleType]:
    """The modules of a function's package and of the packages that it imports from. An installed package counts if it
    has kernels."""
    while isinstance(function, functools.partial):
        function = function.func
    found: dict[str, ModuleType] = {}
    _collect(sys.modules.get(getattr(function, "__module__", "")), found)
    packages = {_package(name) for name, module in found.items() if not _installed(module) or _has_kernels(module)}
    return [m for name, m in sorted(sys.modules.items()) if _package(name) in packages and isinstance(m, ModuleType)]


def _collect(module: Any, found: dict[str, ModuleType]) -> None:
    """Add a module, and the modules that define its names."""
    if not isinstance(module, ModuleType) or module.__name__ in found or _package(module.__name__) in _LIBRARIES:
        return
    found[module.__name__] = module
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            _collect(sys.modules.get(name), found)


def _package(name: str) -> str:
    return name.partition(".")[0]


def _installed(module: ModuleType) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(_INSTALLED)


def _has_kernels(module: ModuleType) -> bool:
    return any(isinstance(value, KernelInterface) for value in vars(module).values())


class ModuleState:
    """The globals of `modules` as one rank sees them; `put` and `take` enclose its host code."""

    def __init__(self, modules: Iterable[ModuleType], replacements: dict[int, Any]) -> None:
        """`replacements`: what a rank has in place of other objects, by their ids."""
        copies = dict(replacements)
        self._modules = [(vars(m), _own(vars(m), copies)) for m in modules]
        self._outside: list[dict[str, Any]] = []

    def put(self) -> None:
        """Replace the modules' globals by the rank's."""
        self._outside = [dict(names) for names, _ in self._modules]
        for names, own in self._modules:
            _replace(names, own)

    def take(self) -> None:
        """Keep the rank's globals, and restore the modules'."""
        for (names, own), outside in zip(self._modules, self._outside, strict=True):
            _replace(own, names)
            _replace(names, outside)


def _replace(names: dict[str, Any], others: dict[str, Any]) -> None:
    names.update(others)
    if len(names) != len(others):
        for name in names.keys() - others.keys():
            del names[name]


def _own(names: dict[str, Any], copies: dict[int, Any]) -> dict[str, Any]:
    """A rank's names. Names of one object, in whatever modules, get one copy."""
    own = {}
    for name, value in names.items():
        own[name] = value if name.startswith("__") else _copied(value, copies)
    return own


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, _CONTAINERS):
        made: Any = copy.copy(value)
        copies[id(value)] = made
        if isinstance(value, dict):
            made.update({key: _copied(part, copies) for key, part in value.items()})
        elif isinstance(made, list):
            made[:] = [_copied(part, copies) for part in value]
        return made
    if isinstance(value, functools._lru_cache_wrapper):
        size = value.cache_parameters()["maxsize"]
        copies[id(value)] = functools.lru_cache(size)(value.__wrapped__)
        return copies[id(value)]
    return value
