"""The source line of an access: the device functions on the stack, innermost first."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType

import greenlet
import numpy as np
import torch
import triton

from tricomm import kernels
from tricomm.kernels.launch import (
    interpreted_wide,
    interpreter,
    jit_dispatch,
    kernel_launch,
    memory_access,
    triton_adapter,
    triton_shortcuts,
)

# A virtual environment may be used through a symbolic link. Its code then has file names with that link.
_HIDDEN = tuple(
    str(path.parent)
    for m in (triton, np, torch, greenlet)
    for path in (Path(m.__file__ or ""), Path(m.__file__ or "").resolve())
) + tuple(
    str(Path(m.__file__ or ""))
    for m in (
        memory_access,
        triton_adapter,
        triton_shortcuts,
        interpreter,
        interpreted_wide,
        jit_dispatch,
        kernel_launch,
    )
)
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = tuple(str(Path(__file__).parents[1] / folder) for folder in ("memory_model", "interpreted"))
_ROOT = interpreter.Program.__call__.__code__
_KERNELS = str(Path(kernels.__file__ or "").parent)
_PACKAGE = str(Path(_KERNELS).parent)
_hidden: dict[str, bool] = {}


@dataclass(frozen=True)
class Site:
    """A place in a kernel: (file, line, function) of the access and of each caller up to the kernel itself."""

    chain: tuple[tuple[str, int, str], ...]
    machine: str = ""  # the PTX instruction; "" for an interpreted kernel

    @cached_property
    def where(self) -> str:
        """file:line in the file of the launched kernel: the access itself, or the call of a helper in another file."""
        if not self.chain:
            return "?"
        home = self.chain[-1][0]
        file, line, _ = next(entry for entry in self.chain if entry[0] == home)
        return f"{file}:{line}"

    @property
    def short(self) -> str:
        """`where` without the folders."""
        file, _, line = self.where.rpartition(":")
        return f"{Path(file).name}:{line}" if file else self.where

    @cached_property
    def text(self) -> str:
        """The whole chain of calls, outermost first."""
        chain = " > ".join(f"{Path(f).name}:{line} {function}" for f, line, function in reversed(self.chain)) or "?"
        return f"{chain}; {self.machine}" if self.machine else chain

    def called_at(self, caller: Site) -> Site:
        """The same place. If it is in a kernel that is not the user's, it is reported at the line of `caller`."""
        if not caller.chain or not self.chain or is_users(self.chain[-1][0]):
            return self
        return Site(self.chain + caller.chain, self.machine)

    @property
    def function(self) -> tuple[str, str]:
        """(file, name) of the innermost device function."""
        return (self.chain[0][0], self.chain[0][2]) if self.chain else ("", "")


def is_users(file: str) -> bool:
    """True for a file of kernels, and for code that belongs neither to tricomm nor to an installed library."""
    kernels = file.startswith(_KERNELS) and not file.startswith(_HIDDEN)
    return kernels or not file.startswith((*_HIDDEN, *_LIBRARIES, _PACKAGE, "<"))


NOWHERE = Site(())
_sites: dict[tuple[tuple[str, int, str], ...], Site] = {}


def current() -> Site:
    """The site of the access that is being made."""
    frame: FrameType | None = sys._getframe(1)
    key = []
    while frame is not None and frame.f_code is not _ROOT:
        file = frame.f_code.co_filename
        hidden = _hidden.get(file)
        if hidden is None:
            hidden = _hidden[file] = file.startswith((*_HIDDEN, *_OWN))
        if not hidden:
            key.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    chain = tuple(key)
    site = _sites.get(chain)
    if site is None:
        site = _sites[chain] = Site(chain)
    return site


def of_host() -> Site:
    """The user's line that is running on the host: the innermost frame outside of tricomm and torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return Site(((name, frame.f_lineno, frame.f_code.co_name),))
        frame = frame.f_back
    return NOWHERE
