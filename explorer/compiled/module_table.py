"""Modules and functions of a simulated GPU: cubins, the PTX that they were assembled from, and the data of a launch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.explorer.memory_model.source_lines import NOWHERE, Site
from tricomm.explorer.ptx.instructions import PtxKernel
from tricomm.explorer.ptx.text.parser import parse
from tricomm.explorer.ptx.units import grid
from tricomm.kernels.launch import cubin
from tricomm.kernels.launch.compiler import ptx_of


@dataclass(eq=False)
class DeviceFunction:
    """A kernel that a context can launch.

    text        the PTX of its module.
    layout      (offset, size) in bytes of each parameter, as the cubin has them.
    shared      bytes of static shared memory.
    most_shared most bytes of dynamic shared memory that a launch may request.
    registers   of a thread.
    """

    name: str
    text: str = field(repr=False)
    layout: tuple[tuple[int, int], ...]
    shared: int
    most_shared: int
    registers: int | None

    @property
    def kernel(self) -> PtxKernel:
        """Its instructions. All ranks that have loaded the kernel share one object, which lives while it is in use."""
        return _parsed(self.text, self.name)


@dataclass(eq=False)
class KernelLaunch:
    """One launch, as it was passed to the driver.

    parameters  the kernel's parameter space
    shared      bytes of dynamic shared memory
    stream      the handle that it was launched on
    tensors     the arguments, which live as long as it runs
    after, end  tokens of `Ordering`: at its begin, and at its end, which the executor sets
    caller      the user's line
    dependent   begins when the kernels `before` it on the stream, or along a graph's edges, have signalled
    signalled   each of its blocks has signalled or ended
    handed      the token of a launch that depends on this one, at its begin
    """

    rank: int
    loaded: DeviceFunction
    parameters: bytes
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int
    stream: int
    tensors: tuple[Any, ...] = ()
    dependent: bool = False
    caller: Site = NOWHERE
    after: Any = None
    end: Any = None
    before: tuple[KernelLaunch, ...] = ()
    signalled: bool = False
    handed: Any = None
    ended: bool = False

    def again(self) -> KernelLaunch:
        """A copy, for another launch."""
        return replace(self, after=None, end=None, before=(), signalled=False, handed=None, ended=False)


@dataclass
class ModuleTable:
    """The modules loaded into one context. The table lives as long as the process, like the launcher's.

    `users`: by hash, name and file, the handle of a user's kernel and its compiled form."""

    modules: list[bytes] = field(default_factory=list)
    functions: dict[int, DeviceFunction] = field(default_factory=dict)
    users: dict[tuple[str, str, str], tuple[int, Any]] = field(default_factory=dict)

    def load(self, image: bytes) -> int:
        if image[:4] != b"\x7fELF":
            raise InvalidArgument("cuModuleLoadData: a cubin is needed, and this is no ELF file")
        self.modules.append(image)
        return len(self.modules) - 1

    def function(self, module: int, name: str, most_shared: int) -> int | None:
        """The handle of a kernel; None if the module has none of that name.

        Raises `InvalidArgument` if the PTX of the module is not known, or has an unknown instruction.
        """
        image = self.modules[module]
        layout = cubin.parameters(image, name)
        if layout is None:
            return None
        handle = 0x1000 + 16 * len(self.functions)
        shared, text = cubin.static_shared(image, name), ptx_of(image)
        if text is None:
            raise InvalidArgument(
                f"{name}: this cubin was not made in this process, so its PTX is not known; compile it with Triton here"
            )
        _parsed(text := sys.intern(text), name)  # here, so that an unknown instruction is refused at the load
        self.functions[handle] = DeviceFunction(
            name, text, tuple(layout), shared, most_shared - shared, cubin.registers(image, name)
        )
        return handle


# A parsed kernel keeps megabytes of generated code. A function under test launches fewer kernels than this.
_MOST_PARSED = 64


@lru_cache(_MOST_PARSED)
def _parsed(text: str, name: str) -> PtxKernel:
    kernel = parse(text, name)
    grid.refuse_unknown(kernel)
    return kernel


_contexts: dict[str, ModuleTable] = {}


def table_of(device: str) -> ModuleTable:
    """The modules loaded into the primary context of the device `device`."""
    return _contexts.setdefault(device, ModuleTable())
