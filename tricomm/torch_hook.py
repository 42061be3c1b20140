"""Registers the backend as soon as torch has been imported, whether before or after tricomm.

`import tricomm` alone does not import torch, because `tricomm --help` needs none. If torch is there already, the
backend is registered at once. If not, a finder on `sys.meta_path` watches the imports of torch and of tricomm's
modules. It acts when torch is there and none of these modules is half imported, and then removes itself.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def install() -> None:
    """Register the backend now if torch has been imported, otherwise when it is."""
    if "torch" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _ImportWatch())


def _register() -> None:
    import_module("tricomm.c10d").register()


class _ImportWatch(MetaPathFinder):
    """Leaves the search to the other finders. After each watched import it checks whether it is time to register."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loading = 0  # watched modules that are being executed, in any thread

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" and not fullname.startswith("tricomm."):
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
            with self._lock:
                self._loading += 1
            try:
                execute(module)
            finally:
                with self._lock:
                    self._loading -= 1
            self._look()

        loader.exec_module = exec_module  # type: ignore[attr-defined]

    def _look(self) -> None:
        with self._lock:
            if self._loading or "torch" not in sys.modules or self not in sys.meta_path:
                return
            sys.meta_path.remove(self)
        try:
            _register()
        except ImportError as error:  # the import that has just succeeded must not fail because of ours
            warnings.warn(f"torch.distributed has no backend tricomm: {error}", ImportWarning, stacklevel=2)
