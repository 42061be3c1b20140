"""Gives each rank its own variables of a program's modules, of their classes and of their objects, as separate
processes would.

Each rank begins with the values before the execution: copies of lists, dicts, sets and tensors, and empty caches of
functions under `functools.cache`. Ranks share the variables of closures and the defaults of arguments.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from triton.runtime.jit import KernelInterface

from tricomm.explorer.standins import cuda_device

_CONTAINERS = (dict, list, set)
_SHARED = {int, str, float, bool, type(None), ModuleType}
_LIBRARIES = sys.stdlib_module_names | {"cuda", "numpy", "torch", "triton", "tricomm"}
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


def modules_of(function: Callable[..., Any]) -> list[ModuleType]:
    """The modules of a function's package and of the packages that it imports from. An installed package counts if it
    has kernels."""
    while isinstance(function, functools.partial):
        function = function.func
    return _related(sys.modules.get(getattr(function, "__module__", "")))


@contextmanager
def importable(function: Callable[..., Any]) -> Iterator[None]:
    """A context manager in which modules next to the function's module, or next to its package, can be imported."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        yield
        return
    folder = str(Path(file).resolve().parents[module.__name__.count(".") + hasattr(module, "__path__")])
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _related(module: Any) -> list[ModuleType]:
    found: dict[str, ModuleType] = {}
    _collect(module, found)
    packages = {_package(name) for name, module in found.items() if not _installed(module) or _has_kernels(module)}
    return [m for name, m in sorted(sys.modules.items()) if _package(name) in packages and isinstance(m, ModuleType)]


def _collect(module: Any, found: dict[str, ModuleType]) -> None:
    """Add a module and the modules that define its names."""
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
    """The variables of `modules` as each rank sees them. `enter(rank)` before its host code, `leave` at the end."""

    def __init__(self, modules: Iterable[ModuleType], replacements: Callable[[], dict[int, Any]]) -> None:
        """`replacements()`: the objects that a rank has in place of others, by the ids of these."""
        self._replacements = replacements
        self._owners: list[Any] = []  # modules, classes and objects
        self._outside: list[dict[str, Any]] = []  # the variables of each, before the execution
        self._known: set[int] = set()
        self._packages: set[str] = set()  # packages of the modules examined so far
        self._ranks: dict[int, list[dict[str, Any]]] = {}
        self._copies: dict[int, dict[int, Any]] = {}
        self._present: int | None = None
        self._imports = 0  # number of imports in progress
        self._add(modules)

    def enter(self, rank: int) -> None:
        if self._present == rank:
            return
        self._save()
        self._present = rank
        self._ranks.setdefault(rank, [])
        self._put(self._of(rank))

    def leave(self) -> None:
        self._save()
        self._present = None
        self._put(self._outside)

    def importing(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Import a module in a rank's host code. Every rank has its variables as they are after the import."""
        self._imports += 1
        before = len(sys.modules)
        try:
            module = load(*args, **kwargs)
        finally:
            self._imports -= 1
        if not self._imports and (len(sys.modules) > before or id(module) not in self._known):
            package = _package(module.__name__)
            if package not in _LIBRARIES and (len(sys.modules) > before or package not in self._packages):
                self._packages.add(package)
                first = len(self._owners)
                self._add(_related(module))
                if self._present is not None:
                    self._put(self._of(self._present), first)
        return module

    def _add(self, modules: Iterable[ModuleType]) -> None:
        owners = [m for m in modules if id(m) not in self._known]
        homes = {m.__name__ for m in owners} | {m.__name__ for m in self._owners if isinstance(m, ModuleType)}
        self._known |= set(map(id, owners))
        for owner in owners:  # the list grows within the loop
            self._owners.append(owner)
            self._outside.append(dict(vars(owner)))
            for value in self._outside[-1].values():
                kind = value if isinstance(value, type) else type(value)
                if kind.__module__ in homes and id(value) not in self._known and _has_variables(value):
                    self._known.add(id(value))
                    owners.append(value)

    def _of(self, rank: int) -> list[dict[str, Any]]:
        """Make the variables of a rank. If several variables have the same object, they get the same copy."""
        own, copies = self._ranks[rank], self._copies.setdefault(rank, {})
        if len(own) < len(self._owners):
            copies |= self._replacements()
            own += [_own(names, copies) for names in self._outside[len(own) :]]
        return own

    def _save(self) -> None:
        if self._present is not None:
            for own, owner in zip(self._ranks[self._present], self._owners, strict=True):
                if not _same(own, vars(owner)):
                    own.clear()
                    own.update(vars(owner))

    def _put(self, values: list[dict[str, Any]], first: int = 0) -> None:
        for owner, names in zip(self._owners[first:], values[first:], strict=True):
            if not _same(names, vars(owner)):
                _replace(owner, names)


def _same(names: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """True if both have the same objects under the same names. Nearly all of some thousand owners never change."""
    same = len(names) == len(others) and all(map(operator.is_, names, others))
    return same and all(map(operator.is_, names.values(), others.values()))


def _has_variables(value: Any) -> bool:
    if isinstance(value, type):
        return type(value).__setattr__ is type.__setattr__
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, ModuleType)


def _replace(owner: Any, others: dict[str, Any]) -> None:
    names = vars(owner)
    if isinstance(owner, type):
        for name in [name for name, value in others.items() if names.get(name) is not value]:
            setattr(owner, name, others[name])
    else:
        names.update(others)
    if len(names) != len(others):
        for name in names.keys() - others.keys():
            delattr(owner, name) if isinstance(owner, type) else names.pop(name)


def _own(names: dict[str, Any], copies: dict[int, Any]) -> dict[str, Any]:
    own = {}
    for name, value in names.items():  # up to tens of thousands, so a call for each would take most of the time
        kind = value.__class__
        if kind in _SHARED or name.startswith("__"):
            own[name] = value
        else:
            own[name] = copies.get(id(value), value) if kind is FunctionType else _copied(value, copies)
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
    if type(value) is torch.Tensor and not value.requires_grad:
        copies[id(value)] = cuda_device.copied(value)
        return copies[id(value)]
    if isinstance(value, functools._lru_cache_wrapper):
        size = value.cache_parameters()["maxsize"]
        copies[id(value)] = functools.lru_cache(size)(value.__wrapped__)
        return copies[id(value)]
    return value
