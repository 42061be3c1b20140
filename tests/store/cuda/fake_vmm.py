"""CUDA's virtual memory management in a fake process: physical memory, addresses and access, with CUDA's rules."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.store.cuda.fake_bindings import Bindings

GRANULE = 2 << 20
VMM, BY_DESCRIPTOR, BY_FABRIC, MULTICAST = 102, 103, 128, 132
POSIX, FABRIC, DEVICE, PINNED, READ_WRITE, RECOMMENDED = 1, 8, 1, 1, 3, 1

NAMES = {
    "CUdevice_attribute": SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=VMM,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=BY_DESCRIPTOR,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED=BY_FABRIC,
        CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED=MULTICAST,
    ),
    "CUmemAllocationHandleType": SimpleNamespace(
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=POSIX, CU_MEM_HANDLE_TYPE_FABRIC=FABRIC
    ),
    "CUmemAllocationType": SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=PINNED),
    "CUmemLocationType": SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=DEVICE),
    "CUmemAccess_flags": SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=READ_WRITE),
    "CUmemAllocationGranularity_flags": SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=RECOMMENDED),
}


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.type = self.requestedHandleTypes = 0
        self.location = SimpleNamespace(type=0, id=-1)


class CUmemAccessDesc:
    def __init__(self) -> None:
        self.location, self.flags = SimpleNamespace(type=0, id=-1), 0


@dataclass(eq=False)
class Physical:
    """One cuMemCreate: lives as long as a handle, a mapping or a descriptor of it. `shareable`: the types of handles;
    `granule`: what its addresses are multiples of."""

    gpu: int
    data: bytearray
    shareable: int
    maker: int
    users: int = field(default=0, init=False)
    granule: int = GRANULE

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def allow(self, gpu: int) -> str | None:
        """The reason why `gpu` may not access this memory; None if it may."""
        return None


@dataclass(eq=False)
class Piece:
    """One cuMemMap. `access`: GPUs whose kernels may touch it."""

    base: int
    nbytes: int
    memory: Physical
    access: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Range:
    """One cuMemAddressReserve, and the mappings in it."""

    base: int
    nbytes: int
    pieces: list[Piece] = field(default_factory=list)


class VirtualMemory:
    """Handles, ranges and mappings of one process. Physical memory is the world's, named by its descriptor's inode."""

    def __init__(self, process: Bindings, refused: Callable[[str], Exception]) -> None:
        self.process, self._refused = process, refused
        self.supported, self.imex_channel = True, True
        self._handles: dict[int, Physical] = {}
        self._ranges: list[Range] = []
        self._next = 1

    def holds(self) -> list[str]:
        me = f"process {self.process.number} still holds"
        return [f"{me} handle {handle}" for handle in self._handles] + [
            f"{me} range {r.base:#x}" + " (mapped)" * bool(r.pieces) for r in self._ranges
        ]

    def die(self) -> None:
        for memory in [*self._handles.values(), *(p.memory for r in self._ranges for p in r.pieces)]:
            memory.users -= 1
        self._handles, self._ranges = {}, []

    def lose(self, gpu: int) -> bool:
        """Destroy the context of a GPU; return whether something was left in it."""
        return any(gpu in piece.access for result in self._ranges for piece in result.pieces)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        if attribute in self.process.missing:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        if attribute == MULTICAST:
            return int(self.process.switch.supported)
        return int(self.supported and attribute in (VMM, BY_DESCRIPTOR, BY_FABRIC))

    def cuMemGetAllocationGranularity(self, properties: CUmemAllocationProp, option: int) -> int:
        self._gpu_of(properties)
        return GRANULE

    def cuMemCreate(self, nbytes: int, properties: CUmemAllocationProp, flags: int) -> int:
        gpu = self._gpu_of(properties)
        if nbytes <= 0 or nbytes % GRANULE or flags:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        if properties.requestedHandleTypes & FABRIC and not self.imex_channel:
            raise self._refused("CUDA_ERROR_NOT_PERMITTED")
        if nbytes + self.process.world.used(gpu) > self.process.world.capacity:
            raise self._refused("CUDA_ERROR_OUT_OF_MEMORY")
        memory = Physical(gpu, bytearray(b"\xa5" * nbytes), properties.requestedHandleTypes, self.process.number)
        self.process.world.physical.append(memory)
        return self.handle(memory)

    def cuMemRelease(self, handle: int) -> None:
        self.memory(handle).users -= 1
        del self._handles[handle]

    def cuMemRetainAllocationHandle(self, address: int) -> int:
        mapped = self.piece(address)
        if mapped is None:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        return self.handle(mapped.memory)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> Any:
        memory = self.memory(handle)
        if kind not in (POSIX, FABRIC) or not memory.shareable & kind:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        if kind == FABRIC:
            token = os.urandom(64)
            self.process.world.by_fabric[token] = memory
            return SimpleNamespace(data=token)
        fd = os.memfd_create("fake-cuda")
        os.set_inheritable(fd, True)  # the driver's may be as well
        self.process.world.exported[os.fstat(fd).st_ino] = memory
        return fd

    def cuMemImportFromShareableHandle(self, shared: Any, kind: int) -> int:
        if kind == FABRIC:
            if not self.imex_channel:
                raise self._refused("CUDA_ERROR_NOT_PERMITTED")
            memory = self.process.world.by_fabric.get(shared)
            if memory is not None and not memory.users:  # such a handle does not keep memory alive
                memory = None
        else:
            try:
                memory = self.process.world.exported.get(os.fstat(shared).st_ino)
            except OSError:
                memory = None
        if memory is None or not memory.shareable & kind:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        return self.handle(memory)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, wanted: int, flags: int) -> int:
        if nbytes <= 0 or nbytes % GRANULE or alignment & (alignment - 1) or wanted or flags:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        self._ranges.append(Range(self.process._fresh_address(nbytes, max(alignment, GRANULE)), nbytes))
        return self._ranges[-1].base

    def cuMemAddressFree(self, address: int, nbytes: int) -> None:
        result = self._range(address, nbytes)
        if (result.base, result.nbytes) != (address, nbytes):
            raise self.process._complain(f"freed {nbytes} bytes at {address:#x}, which it has not reserved as a whole")
        if result.pieces:
            raise self.process._complain(f"freed the addresses {address:#x}, where memory is mapped")
        self._ranges.remove(result)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        result, memory = self._range(address, nbytes), self.memory(handle)
        over = any(address < p.base + p.nbytes and p.base < address + nbytes for p in result.pieces)
        if offset or flags or nbytes != memory.nbytes or over or address % memory.granule:
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        result.pieces.append(Piece(address, nbytes, memory))
        memory.users += 1

    def cuMemUnmap(self, address: int, nbytes: int) -> None:
        pieces = self._pieces(address, nbytes)
        if not pieces:
            raise self.process._complain(f"unmapped {address:#x}, where nothing is mapped")
        if self.process.kernel_running:
            raise self.process._complain(f"unmapped {address:#x} while a kernel runs")
        for piece in pieces:
            piece.memory.users -= 1
            self._range(address, nbytes).pieces.remove(piece)

    def cuMemSetAccess(self, address: int, nbytes: int, access: list[CUmemAccessDesc], count: int) -> None:
        pieces = self._pieces(address, nbytes)
        if not pieces or sum(piece.nbytes for piece in pieces) != nbytes or count != len(access):
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        for each in access:
            if each.location.type != DEVICE or each.flags != READ_WRITE:
                raise self._refused("CUDA_ERROR_INVALID_VALUE")
            gpu = self.process.visible[each.location.id]
            for piece in pieces:
                if gpu != piece.memory.gpu and not self.process.world.reachable(gpu, piece.memory.gpu):
                    raise self._refused("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
                if (wrong := piece.memory.allow(gpu)) is not None:
                    raise self.process._complain(wrong)
                piece.access.add(gpu)

    def behind(self, address: int, nbytes: int, gpu: int) -> tuple[Physical, int] | None:
        """The memory that a kernel of `gpu` accesses at an address; None if it is in no range of this process."""
        for result in self._ranges:
            if result.base <= address and address + nbytes <= result.base + result.nbytes:
                piece = self.piece(address)
                if piece is None:
                    raise self.process._complain(f"touched {address:#x}, a range without a mapping")
                if gpu not in piece.access:
                    raise self.process._complain(f"touched {address:#x} from GPU {gpu} before it was given access")
                if not isinstance(piece.memory, Physical):
                    raise self.process._complain(f"touched {address:#x}, a multicast address, by a plain access")
                assert address + nbytes <= piece.base + piece.nbytes, "one access of the fake touches one allocation"
                return piece.memory, address - piece.base
        return None

    def piece(self, address: int) -> Piece | None:
        """The mapping at an address."""
        pieces = (piece for result in self._ranges for piece in result.pieces)
        return next((piece for piece in pieces if piece.base <= address < piece.base + piece.nbytes), None)

    def made(self, memory: Physical) -> bool:
        return memory.maker == self.process.number

    def handle(self, memory: Physical) -> int:
        memory.users += 1
        self._next += 1
        self._handles[self._next] = memory
        return self._next

    def memory(self, handle: int) -> Physical:
        if handle not in self._handles:
            raise self.process._complain(f"used handle {handle}, which it does not have")
        return self._handles[handle]

    def _range(self, address: int, nbytes: int) -> Range:
        ranges = (r for r in self._ranges if r.base <= address and address + nbytes <= r.base + r.nbytes)
        result = next(ranges, None)
        if result is None:
            raise self.process._complain(f"used {nbytes} bytes at {address:#x}, which it has not reserved")
        return result

    def _pieces(self, address: int, nbytes: int) -> list[Piece]:
        """The mappings in a range; CUDA accepts whole mappings only."""
        end = address + nbytes
        pieces = [p for p in self._range(address, nbytes).pieces if p.base < end and address < p.base + p.nbytes]
        if any(p.base < address or p.base + p.nbytes > end for p in pieces):
            raise self.process._complain(f"took {nbytes} bytes at {address:#x}, a part of a mapping")
        return pieces

    def _gpu_of(self, properties: CUmemAllocationProp) -> int:
        location = properties.location
        if properties.type != PINNED or location.type != DEVICE or not 0 <= location.id < len(self.process.visible):
            raise self._refused("CUDA_ERROR_INVALID_VALUE")
        return self.process.visible[location.id]
