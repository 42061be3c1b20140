"""A kernel on a device: its variables in memory, and its code for each unit shape."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tricomm.explorer.ptx.generated.kernel_code import KernelCode
from tricomm.explorer.ptx.global_memory import GlobalMemory
from tricomm.explorer.ptx.instructions import PtxKernel
from tricomm.explorer.ptx.unit_view import UnitShape

STEPS = 1 << 24


@dataclass
class LoadedKernel:
    """A kernel with its variables in memory, ready to be launched.

    steps   most loop iterations of a unit
    timed   its units tell their surroundings which basic blocks they enter, by `passes(number)`
    """

    kernel: PtxKernel
    memory: GlobalMemory
    watch_shared: bool = False
    steps: int = STEPS
    timed: bool = False
    addresses: dict[str, int] = field(init=False)
    static_shared: int = field(init=False, default=0)
    local_bytes: int = field(init=False, default=0)
    constants: GlobalMemory = field(init=False, default_factory=GlobalMemory)

    def __post_init__(self) -> None:
        self.addresses = {p.name: p.offset for p in self.kernel.parameters}
        self._kept: list[Any] = []
        variables = sorted(self.kernel.variables.values(), key=lambda v: v.size == 0)  # dynamic shared memory is last
        for variable in variables:
            if variable.space == "shared":
                self.static_shared = -(-self.static_shared // variable.align) * variable.align
                self.addresses[variable.name] = self.static_shared
                self.static_shared += variable.size
            elif variable.space == "local":
                self.local_bytes = -(-self.local_bytes // variable.align) * variable.align
                self.addresses[variable.name] = self.local_bytes
                self.local_bytes += variable.size
            elif variable.space in ("const", "global"):
                self._place(variable.name, variable.size, variable.align, variable.data, variable.space)
        self.local_bytes = -(-self.local_bytes // 16) * 16

    def _place(self, name: str, size: int, align: int, data: bytes, space: str) -> None:
        align = max(align, 16)
        raw = np.zeros(size + align + 16, "u1")
        base = -(-raw.ctypes.data // align) * align
        raw[base - raw.ctypes.data :][: len(data)] = np.frombuffer(data, "u1")
        self._kept.append(raw)
        (self.constants if space == "const" else self.memory).add(base, size, f"variable {name}")
        self.addresses[name] = base

    def code(self, shape: UnitShape) -> KernelCode:
        own = self if self._kept else None  # a kernel with variables needs its own code, which contains their addresses
        return _code(self, shape, own)


_codes: dict[tuple[int, int, UnitShape, bool], KernelCode] = {}
_MOST_KEPT = 128
_making = threading.Lock()


def _code(loaded: LoadedKernel, shape: UnitShape, own: object) -> KernelCode:
    key = (id(loaded.kernel), id(own) if own is not None else 0, shape, loaded.timed)
    with _making:
        code = _codes.pop(key, None)
        if code is None:  # the code keeps a reference to its kernel, so the kernel's id stays unique
            code = KernelCode(loaded.kernel, shape, loaded.addresses, loaded.timed)
            if own is not None:
                weakref.finalize(own, _codes.pop, key, None)
        _codes[key] = code  # the last entry is the most recently used
        if len(_codes) > _MOST_KEPT:
            del _codes[next(iter(_codes))]
        return code
