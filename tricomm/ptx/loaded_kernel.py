"""A kernel on a device: its variables in memory, its code for each shape of a unit."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tricomm.ptx.generated.kernel_code import KernelCode
from tricomm.ptx.global_memory import GlobalMemory
from tricomm.ptx.instructions import PtxKernel
from tricomm.ptx.unit_shape import UnitShape

STEPS = 1 << 24


@dataclass
class LoadedKernel:
    """A kernel with its variables in memory, ready to be launched. `steps`: how often a unit may go through loops."""

    kernel: PtxKernel
    memory: GlobalMemory
    watch_shared: bool = False
    steps: int = STEPS
    addresses: dict[str, int] = field(init=False)
    static_shared: int = field(init=False, default=0)
    local_bytes: int = field(init=False, default=0)
    constants: GlobalMemory = field(init=False, default_factory=GlobalMemory)

    def __post_init__(self) -> None:
        self.addresses = {p.name: p.offset for p in self.kernel.parameters}
        self._kept: list[Any] = []
        variables = sorted(self.kernel.variables.values(), key=lambda v: v.size == 0)  # what is dynamic comes last
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
        own = self if self._kept else None  # its code has the addresses of its variables
        return _code(self.kernel, shape, self.addresses, own)


_codes: dict[tuple[int, int, UnitShape], KernelCode] = {}
_MOST_KEPT = 128
_making = threading.Lock()


def _code(kernel: PtxKernel, shape: UnitShape, addresses: dict[str, int], own: object) -> KernelCode:
    key = (id(kernel), id(own) if own is not None else 0, shape)
    with _making:
        found = _codes.pop(key, None)
        if found is None:
            found = KernelCode(kernel, shape, addresses)  # refers to its kernel: the number stays its own
            if own is not None:
                weakref.finalize(own, _codes.pop, key, None)
        _codes[key] = found  # the last one is the newest
        if len(_codes) > _MOST_KEPT:
            del _codes[next(iter(_codes))]
        return found
