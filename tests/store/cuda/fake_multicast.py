"""The part of a fake process that binds memory of several GPUs to one address, and runs the probe's kernels over it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.store.cuda.fake_vmm import GRANULE, Physical
from tricomm.store.arenas.cuda_multicast import PROBE

if TYPE_CHECKING:
    from tests.store.cuda.fake_bindings import Bindings

LEAST = 0
NAMES = {"CUmulticastGranularity_flags": SimpleNamespace(CU_MULTICAST_GRANULARITY_MINIMUM=LEAST)}


class CUmulticastObjectProp:
    def __init__(self) -> None:
        self.numDevices = self.size = self.flags = self.handleTypes = 0


@dataclass(eq=False)
class MulticastObject:
    """One cuMulticastCreate. `bound`: memory by GPU. It lives like memory, by handles, mappings and descriptors."""

    nbytes: int
    devices: int
    maker: int
    shareable: int
    users: int = field(default=0, init=False)
    gpus: list[int] = field(default_factory=list)
    bound: dict[int, Physical] = field(default_factory=dict)
    gpu: int = -1
    data: bytes = b""
    granule: int = GRANULE

    def allow(self, gpu: int) -> str | None:
        return None if gpu in self.gpus else f"gave GPU {gpu} access to a multicast object that it was not added to"


class Switch:
    """Multicast objects as one process uses them, and its modules. `granule`: the granularity of memory to bind.

    `loses_stores`, `adds_wrong`, `faults`: the faults of a switch that does not work."""

    def __init__(self, process: Bindings, refused: Callable[[str], Exception]) -> None:
        self.process, self._refused = process, refused
        self.supported, self.granule = True, GRANULE
        self.loses_stores = self.adds_wrong = self.faults = False
        self._bound: list[tuple[MulticastObject, int]] = []
        self._modules: set[int] = set()
        self._next = 1 << 20

    def holds(self) -> list[str]:
        me = f"process {self.process.number} still has"
        return [f"{me} memory of GPU {gpu} bound" for _, gpu in self._bound] + [f"{me} a module"] * len(self._modules)

    def die(self) -> None:
        for whole, gpu in self._bound:
            whole.bound.pop(gpu).users -= 1
        self._bound = []

    def cuMulticastGetGranularity(self, properties: CUmulticastObjectProp, option: int) -> int:
        return self.granule

    def cuMulticastCreate(self, properties: CUmulticastObjectProp) -> int:
        if properties.size <= 0 or properties.size % self.granule or properties.flags or properties.numDevices < 1:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        made = MulticastObject(
            properties.size, properties.numDevices, self.process.number, properties.handleTypes, granule=self.granule
        )
        self.process.world.physical.append(made)  # type: ignore[arg-type]  # it is reference-counted
        return self.process.vmm.handle(made)  # type: ignore[arg-type]

    def cuMulticastAddDevice(self, handle: int, device: int) -> None:
        whole, gpu = self._whole(handle), self.process.visible[device]
        if gpu in whole.gpus or len(whole.gpus) == whole.devices:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        whole.gpus.append(gpu)

    def cuMulticastBindMem(
        self, handle: int, offset: int, memory: int, memory_offset: int, nbytes: int, flags: int
    ) -> None:
        whole, physical = self._whole(handle), self.process.vmm.memory(memory)
        if len(whole.gpus) < whole.devices:
            raise self.process._complain("bound memory to a multicast object before all devices were added")
        if offset or memory_offset or flags or nbytes % self.granule or nbytes != min(whole.nbytes, physical.nbytes):
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        if physical.gpu not in whole.gpus or physical.gpu in whole.bound:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        whole.bound[physical.gpu] = physical
        physical.users += 1
        self._bound.append((whole, physical.gpu))

    def cuMulticastUnbind(self, handle: int, device: int, offset: int, nbytes: int) -> None:
        whole, gpu = self._whole(handle), self.process.visible[device]
        if (whole, gpu) not in self._bound or offset or nbytes != whole.nbytes:
            raise self.process._complain("unbound what it had not bound")
        if self.process.kernel_running:
            raise self.process._complain("unbound memory while a kernel runs")
        self._bound.remove((whole, gpu))
        whole.bound.pop(gpu).users -= 1

    def cuModuleLoadData(self, ptx: bytes) -> int:
        assert ptx == PROBE, "the only PTX that the fake knows; what it does is tested on the PTX machine"
        self.process._current_gpu()
        self._next += 1
        self._modules.add(self._next)
        return self._next

    def cuModuleUnload(self, module: int) -> None:
        self._modules.remove(module)

    def cuModuleGetFunction(self, module: int, name: bytes) -> str:
        assert module in self._modules
        return name.decode()

    def cuLaunchKernel(self, function: str, *shape: Any) -> None:
        *grid, shared, stream, (values, kinds), extra = shape
        assert grid == [1] * 6 and len(values) == len(kinds) and not (shared or stream or extra)
        self.process.kernel_running = True
        if self.faults:  # which the next call shows
            self.process.sticky = "CUDA_ERROR_ILLEGAL_INSTRUCTION"
        else:
            getattr(self, f"_{function}")(*values)

    def _store(self, to: int, value: int) -> None:
        for memory, at in self._places(to):
            if not self.loses_stores or memory.maker == self.process.number:
                memory.data[at : at + 4] = struct.pack("<I", value & 0xFFFFFFFF)

    def _sum(self, source: int, to: int) -> None:
        words = [struct.unpack_from("<I", memory.data, at)[0] for memory, at in self._places(source)]
        result = self.process.vmm.behind(to, 4, self.process._current_gpu())
        assert result is not None
        memory, at = result
        memory.data[at : at + 4] = struct.pack("<I", sum(words[self.adds_wrong :]) & 0xFFFFFFFF)

    def _places(self, address: int) -> Sequence[tuple[Physical, int]]:
        """The physical memory of all ranks that `multimem` accesses at an address."""
        result, gpu = self.process.vmm.piece(address), self.process._current_gpu()
        if result is None or not isinstance(result.memory, MulticastObject) or gpu not in result.access:
            raise self.process._complain(f"used {address:#x} by multimem, where GPU {gpu} has no multicast object")
        whole = result.memory
        if len(whole.bound) < whole.devices:
            raise self.process._complain("used a multicast address before every rank had bound its memory")
        return [(memory, address - result.base) for memory in whole.bound.values()]

    def _whole(self, handle: int) -> MulticastObject:
        whole = self.process.vmm.memory(handle)
        if not isinstance(whole, MulticastObject):
            raise self.process._complain(f"used handle {handle}, which is no multicast object")
        return whole
