"""Registers the backend once torch has been imported, and keeps Dynamo out of tricomm once Dynamo has been imported.

`import tricomm` alone imports neither torch, because `tricomm --help` needs none, nor Dynamo, which takes a second. If
one of them has not been imported, a finder on `sys.meta_path` watches its import, acts after it, and then removes
itself.

Dynamo does not trace into a backend that is written in C++. Without a rule it would trace into ours and replace the
code of a call by code whose errors the ranks do not share.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import iter_modules
from types import ModuleType


def install() -> None:
    """Register with modules that have been imported, now, and with the others when they are imported."""
    when("torch._dynamo", _keep_dynamo_out, "torch.compile traces into tricomm")
    when("torch", _register, "torch.distributed has no backend tricomm")


def _register() -> None:
    import_module("tricomm.torch_backend").register()


def _keep_dynamo_out() -> None:
    """Dynamo may still trace the engines' methods, which check whether they are being compiled."""
    add = import_module("torch._dynamo.trace_rules").add
    for room in iter_modules(import_module("tricomm").__path__, "tricomm."):
        if room.name != "tricomm.engines":
            add(room.name)


def when(module: str, act: Callable[[], None], otherwise: str) -> None:
    """Call `act` after the import of `module`, or now. `otherwise`: the consequence of a failure, for the warning."""
    if module in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _ImportWatch(module, act, otherwise))


class _ImportWatch(MetaPathFinder):
    """A finder that leaves the search to the other finders, and acts after the import of `module`. `otherwise` is the
    consequence of a failure, for the warning."""

    def __init__(self, module: str, act: Callable[[], None], otherwise: str) -> None:
        self._module, self._act, self._otherwise = module, act, otherwise

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: object) -> None:
        execute: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            try:
                self._act()
            except (ImportError, AttributeError) as error:  # the import that has just succeeded must not fail
                warnings.warn(f"{self._otherwise}: {error}", ImportWarning, stacklevel=2)

        loader.exec_module = exec_module  # type: ignore[attr-defined]
