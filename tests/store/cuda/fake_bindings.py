"""A fake of the module `cuda.bindings.driver` for one process of a `FakeCuda` world."""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from tests.store.cuda import fake_multicast, fake_vmm
from tests.store.cuda.fake_ipc import Block, CUipcMemHandle, Mapping
from tests.store.cuda.fake_multicast import Switch
from tests.store.cuda.fake_vmm import Physical, VirtualMemory
from tests.store.fake_host import PinnedPages

if TYPE_CHECKING:
    from tests.store.cuda.fake_driver import CudaRuleBroken, FakeCuda

Kept = TypeVar("Kept", Block, Mapping)
GRANULE = 2 << 20


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_ILLEGAL_INSTRUCTION = 715
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_UNKNOWN = 999


# A fault of a kernel makes the context unusable: every later call that needs one returns the same error.
STICKY = {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_LAUNCH_FAILED"}
_WITHOUT_CONTEXT = ("cuInit", "cuDevice", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchange")


# CUDA refuses these in a thread in the global capture mode during any capture, which becomes invalid.
_NOT_IN_A_CAPTURE = {
    "cuMemAlloc", "cuMemFree", "cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemsetD8", "cuCtxSynchronize", "cuModuleLoadData"
}  # fmt: skip


class _Refused(Exception):
    """The call returns an error code, as CUDA specifies."""

    def __init__(self, name: str) -> None:
        self.status = CUresult[name]


def _call(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    name = function.__name__

    @functools.wraps(function)
    def recorded(self: Bindings, *arguments: Any) -> tuple[Any, ...]:
        with self.world.lock:
            self.calls.append(name)
            self.world.log.append((self.number, name))
            self.counts[name] += 1
            if name in self.missing:  # the bindings have every name, also those that the driver lacks
                raise RuntimeError(f'Function "{name}" not found')
            failure = self.failures.get((name, self.counts[name]))
            if failure in STICKY:
                self.sticky = failure
            if self.sticky and not name.startswith(_WITHOUT_CONTEXT):
                return (CUresult[self.sticky],) + (None,)
            if self.capturing and self.capture_mode == 0 and name in _NOT_IN_A_CAPTURE:
                return (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,) + (None,)
            # Popping reports earlier errors, but does pop.
            if failure and name != "cuCtxPopCurrent":
                return (CUresult[failure],) + (None,)
            try:
                value = function(self, *arguments)
            except _Refused as refusal:
                return (refusal.status,) + (None,)
        status = CUresult[failure] if failure else CUresult.CUDA_SUCCESS
        return (status, *value) if isinstance(value, tuple) else (status, value)

    return recorded


def _of(part: str, name: str) -> Callable[..., tuple[Any, ...]]:
    def call(self: Bindings, *arguments: Any) -> Any:
        return getattr(getattr(self, part), name)(*arguments)

    call.__name__ = name
    return _call(call)


class Bindings:
    """The functions and types of `cuda.bindings.driver`, as one process calls them."""

    CUresult = CUresult
    CUipcMemHandle = CUipcMemHandle
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUmemAllocationProp, CUmemAccessDesc = fake_vmm.CUmemAllocationProp, fake_vmm.CUmemAccessDesc
    locals().update(fake_vmm.NAMES)
    CUmulticastObjectProp = fake_multicast.CUmulticastObjectProp
    locals().update(fake_multicast.NAMES)
    for _part, _kind in (("vmm", VirtualMemory), ("switch", Switch)):
        for _name in vars(_kind):
            if _name.startswith("cu"):
                locals()[_name] = _of(_part, _name)

    def __init__(self, world: FakeCuda, number: int, visible: tuple[int, ...]) -> None:
        self.world, self.number, self.visible = world, number, visible
        self.alive = True
        self.calls: list[str] = []
        self.counts: Counter[str] = Counter()
        self.failures: dict[tuple[str, int], str] = {}
        self.missing: set[str] = set()  # functions, and numbers of attributes, that an old driver does not have
        self.sticky: str | None = None
        self.loses_writes_to_peers = False
        self.kernel_running = False
        self.capture_mode, self.capturing = 0, False  # global
        self._initialised = False
        self._retained: Counter[int] = Counter()
        self._stack = threading.local()
        self._blocks: list[Block] = []
        self._mappings: list[Mapping] = []
        self.pinned = PinnedPages(self._complain)
        self.vmm, self.switch = VirtualMemory(self, _Refused), Switch(self, _Refused)
        self._next_address = (number + 1) << 40

    def holds(self) -> list[str]:
        me = f"process {self.number} still holds"
        return (
            [f"{me} block {block.base:#x}" for block in self._blocks if block.live]
            + [f"{me} mapping {mapping.base:#x}" for mapping in self._mappings if mapping.live]
            + [f"{me} pinned page {page.address:#x}" + " (gone)" * (not page.there) for page in self.pinned.all]
            + [f"{me} the context of GPU {gpu}" for gpu, count in self._retained.items() if count]
            + self.vmm.holds()
            + self.switch.holds()
        )

    def die(self) -> None:
        self.alive = False
        for mapping in self._mappings:
            if mapping.live:
                mapping.block.mappings[self.number] -= 1
        for part in (self.switch, self.vmm):
            part.die()

    @_call
    def cuInit(self, flags: int) -> None:
        self._initialised = True

    @_call
    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> int:
        before, self.capture_mode = self.capture_mode, mode
        return before

    @_call
    def cuDeviceGetCount(self) -> int:
        return len(self.visible)

    @_call
    def cuDeviceGet(self, ordinal: int) -> int:
        if not self._initialised or not 0 <= ordinal < len(self.visible):
            raise _Refused("CUDA_ERROR_INVALID_DEVICE")
        return ordinal

    @_call
    def cuDeviceGetUuid(self, device: int) -> Any:
        return SimpleNamespace(bytes=hashlib.md5(b"gpu%d" % self.visible[device]).digest())

    @_call
    def cuDeviceGetPCIBusId(self, length: int, device: int) -> bytes:
        return (b"0000:%02x:00.0" % self.visible[device]).ljust(length, b"\0")

    @_call
    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> int:
        return int(self.world.reachable(self.visible[device], self.visible[peer]))

    @_call
    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        self._retained[self.visible[device]] += 1
        return self._context_of(self.visible[device])

    @_call
    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        gpu = self.visible[device]
        if not self._retained[gpu]:
            raise self._complain(f"released the context of GPU {gpu}, which it does not hold")
        self._retained[gpu] -= 1
        if not self._retained[gpu]:
            self._reset(gpu)

    def _reset(self, gpu: int) -> None:
        """Destroy a context and everything in it, which only a process that has seen a failure may do."""
        blocks = [block for block in self._blocks if block.live and block.gpu == gpu]
        mappings = [mapping for mapping in self._mappings if mapping.live and mapping.gpu == gpu]
        pinned = [page for page in self.pinned.all if page.gpu == gpu]
        if (blocks or mappings or pinned or self.vmm.lose(gpu)) and not (self.failures or self.sticky):
            raise self._complain(f"destroyed the context of GPU {gpu} with something in it")
        for mapping in mappings:
            self._unmap(mapping)
        for block in blocks:
            self._free(block)
        for page in pinned:
            self.pinned.all.remove(page)

    @_call
    def cuCtxPushCurrent(self, context: int) -> None:
        gpu = context - self._context_of(0)
        if not self._retained[gpu]:
            raise self._complain(f"made context {context} current, which it does not hold")
        self._contexts().append(gpu)

    @_call
    def cuCtxPopCurrent(self) -> int:
        if not self._contexts():
            raise self._complain("popped a context that it did not push")
        return self._context_of(self._contexts().pop())

    @_call
    def cuCtxSynchronize(self) -> None:
        self._current_gpu()
        self.kernel_running = False

    @_call
    def cuMemAlloc(self, nbytes: int) -> int:
        gpu = self._current_gpu()
        if nbytes + self.world.used(gpu) > self.world.capacity:
            raise _Refused("CUDA_ERROR_OUT_OF_MEMORY")
        # Poison, since CUDA does not clear what it hands out.
        block = Block(self, gpu, self._fresh_address(nbytes), bytearray(b"\xa5" * nbytes))
        self._blocks.append(block)
        return block.base

    @_call
    def cuMemFree(self, address: int) -> None:
        self._current_gpu()
        self._free(self._live(self._blocks, address, f"freed {address:#x}, which is no block or is freed already"))

    def _live(self, kept: list[Kept], address: int, complaint: str) -> Kept:
        for one in kept:
            if one.base == address and one.live:
                return one
        raise self._complain(complaint)

    def _free(self, block: Block) -> None:
        holders = [number for number, count in block.mappings.items() if count]
        if holders:
            raise self._complain(f"freed block {block.base:#x} while process(es) {holders} have it mapped")
        if self.kernel_running:
            raise self._complain(f"freed block {block.base:#x} while a kernel runs")
        block.live = False

    @_call
    def cuMemGetAddressRange(self, address: int) -> tuple[int, int]:
        mapped = self.vmm.piece(address)
        if mapped is not None:
            return mapped.base, mapped.nbytes
        block, _ = self._find(address, 1)
        assert isinstance(block, Block), "no cuMemAlloc"
        return block.base, len(block.data)

    @_call
    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> None:
        block, start = self._find(address, nbytes)
        block.data[start : start + nbytes] = bytes([value]) * nbytes

    @_call
    def cuMemcpyDtoH(self, host: int, address: int, nbytes: int) -> None:
        page = self.pinned.behind(address, nbytes)
        if page is not None:
            ctypes.memmove(host, page.read(address, nbytes), nbytes)
            return
        block, start = self._find(address, nbytes)
        ctypes.memmove(host, bytes(block.data[start : start + nbytes]), nbytes)

    @_call
    def cuMemcpyHtoD(self, address: int, host: int, nbytes: int) -> None:
        page = self.pinned.behind(address, nbytes)
        if page is not None:
            page.write(address, ctypes.string_at(host, nbytes))
            return
        block, start = self._find(address, nbytes)
        own = block.owner is self if isinstance(block, Block) else self.vmm.made(block)
        if own or not self.loses_writes_to_peers:
            block.data[start : start + nbytes] = ctypes.string_at(host, nbytes)

    @_call
    def cuIpcGetMemHandle(self, address: int) -> CUipcMemHandle:
        self._current_gpu()
        block = next((block for block in self._blocks if block.base == address and block.live), None)
        if block is None:
            raise self._complain(f"exported {address:#x}, which is not the start of a block that it has allocated")
        if len(block.data) % GRANULE:
            raise self._complain(f"exported a block of {len(block.data)} bytes, and with it its neighbours")
        data = hashlib.sha512(b"%d %d" % (self.number, self._blocks.index(block))).digest()
        self.world.handles[data] = block
        handle = CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), data, 64)
        return handle

    @_call
    def cuIpcOpenMemHandle(self, handle: CUipcMemHandle, flags: int) -> int:
        gpu = self._current_gpu()
        block = self.world.handles.get(ctypes.string_at(handle.getPtr(), 64))
        if block is None:
            raise _Refused("CUDA_ERROR_INVALID_HANDLE")
        if block.owner is self:
            raise self._complain("opened its own handle, which CUDA allows other processes only")
        if not block.live:
            raise self._complain(f"opened the handle of freed block {block.base:#x}")
        if flags & 1 and gpu != block.gpu and not self.world.reachable(gpu, block.gpu):
            raise _Refused("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        block.mappings[self.number] += 1
        base = self._fresh_address(len(block.data))
        self._mappings.append(Mapping(base, block, gpu, peer_access=bool(flags & 1) or gpu == block.gpu))
        return base

    @_call
    def cuIpcCloseMemHandle(self, address: int) -> None:
        self._current_gpu()
        complaint = f"closed {address:#x}, which is no mapping or is closed already"
        self._unmap(self._live(self._mappings, address, complaint))

    def _unmap(self, mapping: Mapping) -> None:
        if self.kernel_running:
            raise self._complain(f"closed mapping {mapping.base:#x} while a kernel runs")
        mapping.live = False
        mapping.block.mappings[self.number] -= 1

    @_call
    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> None:
        gpu = self._current_gpu()
        refusal = self.pinned.add(address, nbytes, flags, gpu, (1 << 60) + address)
        if refusal is not None:
            raise _Refused(refusal)

    @_call
    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> int:
        page = self.pinned.at(address)
        if page is None:
            raise _Refused("CUDA_ERROR_INVALID_VALUE")
        return page.device_address

    @_call
    def cuMemHostUnregister(self, address: int) -> None:
        self._current_gpu()
        self.pinned.remove(address, self.kernel_running)

    def cuGetErrorString(self, status: CUresult) -> tuple[CUresult, bytes]:
        return CUresult.CUDA_SUCCESS, b"CUDA's own words"

    def _complain(self, text: str) -> CudaRuleBroken:
        return self.world.complain(f"process {self.number} {text}")

    def _context_of(self, gpu: int) -> int:
        return 1000 * (self.number + 1) + gpu

    def _contexts(self) -> list[int]:
        if not hasattr(self._stack, "gpus"):
            self._stack.gpus = []
        return self._stack.gpus

    def _current_gpu(self) -> int:
        if not self._contexts():
            raise _Refused("CUDA_ERROR_INVALID_CONTEXT")
        return self._contexts()[-1]

    def _fresh_address(self, nbytes: int, alignment: int = GRANULE) -> int:
        address = -(-self._next_address // alignment) * alignment
        self._next_address = address + -(-nbytes // GRANULE) * GRANULE + GRANULE
        return address

    def _find(self, address: int, nbytes: int) -> tuple[Block | Physical, int]:
        gpu = self._current_gpu()
        result = self.vmm.behind(address, nbytes, gpu)
        if result is not None:
            return result
        for mapping in self._mappings:
            if mapping.live and mapping.base <= address and address + nbytes <= mapping.base + len(mapping.block.data):
                if not mapping.block.live:
                    raise self._complain(f"touched {address:#x} after its owner freed it")
                if not mapping.peer_access or mapping.gpu != gpu:
                    raise self._complain(f"touched GPU {mapping.block.gpu} from GPU {gpu} without peer access")
                return mapping.block, address - mapping.base
        for block in self._blocks:
            if block.base <= address and address + nbytes <= block.base + len(block.data):
                if not block.live:
                    raise self._complain(f"touched {address:#x} after it freed it")
                return block, address - block.base
        raise self._complain(f"touched {address:#x} (+{nbytes}), where nothing is mapped")
