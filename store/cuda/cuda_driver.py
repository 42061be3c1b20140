"""The CUDA driver calls that sharing memory needs: typed, loaded on first use, and checked in one place.

A `Driver` works on any object with the functions of the module `cuda.bindings.driver` (12.9.1 to 13.x), so tests can
substitute a fake that enforces CUDA's rules and still run every line of this file. Contexts and addresses are
plain ints, sizes are bytes. Every method raises `ResourceError` that names the call, CUDA's error, and what to do.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from tricomm.cuda_bindings import INSTALL, load_bindings
from tricomm.errors import ResourceError

HANDLE_BYTES = 64
DESCRIPTOR, FABRIC = "POSIX_FILE_DESCRIPTOR", "FABRIC"  # CUDA's names of the kinds of handle by which memory is shared
UUID_BYTES = 16
PAGE_BYTES = 4096

_log = logging.getLogger(__name__)

_HOST_PORTABLE_AND_MAPPED = 0x01 | 0x02  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_LAZY_ENABLE_PEER_ACCESS = 0x01  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_BUS_ID_BYTES = 32

_IPC_HELP = (
    "each rank must be a process of its own, containers must share the IPC and PID namespaces (docker: --ipc=host "
    "--pid=host, or one container for all ranks), and CUDA IPC does not cross MIG instances"
)
_PLAIN_WORDS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "too little free memory on this GPU; ask for a smaller arena, or free some there",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible to this process; look at CUDA_VISIBLE_DEVICES and nvidia-smi",
    "CUDA_ERROR_INVALID_DEVICE": "no such GPU in this process; look at CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "these two GPUs cannot reach each other's memory",
    "CUDA_ERROR_TOO_MANY_PEERS": "this GPU has as many peers as the machine allows",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU, driver or virtual machine does not support the call",
    "CUDA_ERROR_NOT_PERMITTED": "this process has no right to it; fabric handles need an IMEX channel of the machine",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel touched memory it may not; this process must be restarted",
    "CUDA_ERROR_LAUNCH_FAILED": "an earlier kernel failed; this process must be restarted",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "this GPU was reset in this process (cudaDeviceReset?); restart the process",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "this GPU's memory is faulty; look at nvidia-smi -q and dmesg, restart the process",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "memory at this address is registered already; restart the process",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the machine's GPU services are not up (NVSwitch: nvidia-fabricmanager)",
}
_HELP_FOR_CALL = {
    "cuInit": INSTALL,
    "cuIpcGetMemHandle": _IPC_HELP,
    "cuIpcOpenMemHandle": _IPC_HELP,
    "cuMemImportFromShareableHandle": "all GPUs of a group must be of one driver, and MIG instances of one GPU",
    "cuMemHostRegister": "look at `ulimit -l` (locked memory)",
}


@cache
def load_driver() -> Driver:
    """This process's driver; raises `ResourceError` if the Python package for it is missing or too old."""
    return Driver(load_bindings("driver"))


class Driver:
    """The part of CUDA's driver API that tricomm uses. One per process: `load_driver()`."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self.switched: set[int] = set()  # GPUs on which a multicast address was tested successfully in this process

    def init(self) -> None:
        self._call("cuInit", 0)

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def device_uuid(self, ordinal: int) -> bytes:
        """16 bytes that identify the GPU (or MIG instance), the same in all processes, whichever GPUs they see."""
        # In 12.x only the _v2 form tells MIG instances apart; in 13.x it has the plain name.
        name = "cuDeviceGetUuid_v2" if hasattr(self._bindings, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return bytes(self._call(name, self._device(ordinal)).bytes)

    def device_bus_id(self, ordinal: int) -> str:
        text = self._call("cuDeviceGetPCIBusId", _BUS_ID_BYTES, self._device(ordinal))
        return bytes(text).split(b"\0", 1)[0].decode("ascii", "replace")

    def can_access_peer(self, ordinal: int, peer_ordinal: int) -> bool:
        return bool(self._call("cuDeviceCanAccessPeer", self._device(ordinal), self._device(peer_ordinal)))

    def retain_context(self, ordinal: int) -> int:
        """The device's primary context, the one that torch uses; each call pairs with a `release_context`."""
        return int(self._call("cuDevicePrimaryCtxRetain", self._device(ordinal)))

    def release_context(self, ordinal: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device(ordinal))

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """A context manager: `context` is current in this thread inside, and the previous one again afterwards."""
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def relax_capture(self) -> None:
        """Let this thread query events while another one captures a CUDA graph, without invalidating the capture."""
        self._call(
            "cuThreadExchangeStreamCaptureMode", self._bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )

    # All methods below use the current context.

    def mem_alloc(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def mem_free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def mem_range(self, address: int) -> tuple[int, int]:
        """(start, bytes) of the allocation that holds `address`."""
        base, size = self._call("cuMemGetAddressRange", address)
        return int(base), int(size)

    def memset(self, address: int, value: int, nbytes: int) -> None:
        self._call("cuMemsetD8", address, value, nbytes)

    def read(self, address: int, nbytes: int) -> bytes:
        host = ctypes.create_string_buffer(nbytes)
        self._call("cuMemcpyDtoH", ctypes.addressof(host), address, nbytes)
        return host.raw

    def write(self, address: int, data: bytes) -> None:
        host = ctypes.create_string_buffer(data, len(data))
        self._call("cuMemcpyHtoD", address, ctypes.addressof(host), len(data))

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def ipc_get_handle(self, base: int) -> bytes:
        """64 bytes with which another process can map the allocation that starts at `base`."""
        structure = self._call("cuIpcGetMemHandle", base)  # in a variable, because its bytes are freed with it
        return ctypes.string_at(structure.getPtr(), HANDLE_BYTES)

    def ipc_open_handle(self, handle: bytes) -> int:
        """Address here of another process's allocation; call `ipc_close_handle` before the owner frees it."""
        # In 13.x the bytes of the structure are not accessible; all versions have its address.
        structure = self._bindings.CUipcMemHandle()
        ctypes.memmove(structure.getPtr(), handle, HANDLE_BYTES)
        # Lazy peer access needs no context on the peer's GPU; cuCtxEnablePeerAccess would cost one (hundreds of MiB)
        # per process and GPU, and is impossible for a GPU that this process cannot see.
        return int(self._call("cuIpcOpenMemHandle", structure, _LAZY_ENABLE_PEER_ACCESS))

    def ipc_close_handle(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    # Virtual memory management: physical memory, addresses and access rights are created separately.

    def vmm_refusal(self, ordinal: int, sharing: str = DESCRIPTOR) -> str | None:
        """The reason why memory of this GPU cannot be shared by `sharing` handles; None if it can."""
        names = "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", f"HANDLE_TYPE_{sharing}_SUPPORTED"
        return next((why for name in names if (why := self._lacks(ordinal, name)) is not None), None)

    def _lacks(self, ordinal: int, name: str) -> str | None:
        """The reason why a GPU lacks the property of this name; None if it has it."""
        name = f"CU_DEVICE_ATTRIBUTE_{name}"
        attribute = getattr(self._bindings.CUdevice_attribute, name, None)
        if attribute is None:
            return f"these CUDA bindings do not know {name}; {INSTALL}"
        device = self._device(ordinal)
        try:
            if int(self._call("cuDeviceGetAttribute", attribute, device)):
                return None
        except ResourceError as error:  # "invalid value" if the attribute is newer than the driver
            return f"{name}: {error}"
        return f"{name} is 0 for GPU {self.device_bus_id(ordinal)}"

    def granularity(self, ordinal: int, sharing: str = DESCRIPTOR) -> int:
        """Granularity of sizes and addresses, in bytes."""
        recommended = self._bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._shareable(ordinal, sharing), recommended))

    def mem_create(self, ordinal: int, nbytes: int, sharing: str = DESCRIPTOR) -> int:
        """Handle of new memory on a GPU; pairs with `mem_release`. The memory lives until all its handles are released,
        its descriptors closed and its mappings removed."""
        return int(self._call("cuMemCreate", nbytes, self._shareable(ordinal, sharing), 0))

    def mem_release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def retain_handle(self, address: int) -> int:
        """Handle of the cuMemCreate memory at a mapped address; pairs with `mem_release`."""
        return int(self._call("cuMemRetainAllocationHandle", address))

    def export_descriptor(self, handle: int) -> int:
        """A new file descriptor, which the caller closes; any process that receives it can map the memory."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._kind(DESCRIPTOR), 0))

    def import_descriptor(self, fd: int) -> int:
        """Handle of the memory that a descriptor refers to, which the caller still owns; pairs with `mem_release`."""
        return int(self._call("cuMemImportFromShareableHandle", fd, self._kind(DESCRIPTOR)))

    def export_fabric(self, handle: int) -> bytes:
        """64 bytes with which any process that may use the same IMEX channel can map the memory while it lives."""
        return bytes(self._call("cuMemExportToShareableHandle", handle, self._kind(FABRIC), 0).data)

    def import_fabric(self, token: bytes) -> int:
        """Handle of the memory that the 64 bytes of `export_fabric` refer to; pairs with `mem_release`."""
        return int(self._call("cuMemImportFromShareableHandle", token, self._kind(FABRIC)))

    def address_reserve(self, nbytes: int, alignment: int) -> int:
        """A reserved address range without memory; pairs with `address_free`."""
        return int(self._call("cuMemAddressReserve", nbytes, alignment, 0, 0))

    def address_free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        """Map memory at a reserved range; call `mem_allow` before use. Pairs with `mem_unmap`."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def mem_unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def mem_allow(self, address: int, nbytes: int, ordinal: int) -> None:
        """Let kernels of GPU `ordinal` read and write the mapped range."""
        access = self._bindings.CUmemAccessDesc()
        access.location.type = self._bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._device(ordinal))
        access.flags = self._bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    # Multicast: memory of several GPUs at one address, for the switch's instructions.

    def multicast_refusal(self, ordinal: int) -> str | None:
        """The reason why a GPU has no multicast addresses; None if it has."""
        return self._lacks(ordinal, "MULTICAST_SUPPORTED")

    def multicast_granularity(self, devices: int, nbytes: int, sharing: str = DESCRIPTOR) -> int:
        """Granularity, in bytes, of the memory bound to a multicast object of `devices` GPUs."""
        least = self._bindings.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        return int(self._call("cuMulticastGetGranularity", self._multicast(devices, nbytes, sharing), least))

    def multicast_create(self, devices: int, nbytes: int, sharing: str = DESCRIPTOR) -> int:
        """Handle of a multicast object to which `devices` GPUs have to be added; pairs with `mem_release`. Exported and
        imported like memory."""
        return int(self._call("cuMulticastCreate", self._multicast(devices, nbytes, sharing)))

    def multicast_add(self, handle: int, ordinal: int) -> None:
        """Add a GPU. No memory may be bound before all are added."""
        self._call("cuMulticastAddDevice", handle, self._device(ordinal))

    def multicast_bind(self, handle: int, memory: int, nbytes: int) -> None:
        """Bind this GPU's memory, of handle `memory`, to the object; pairs with `multicast_unbind`."""
        self._call("cuMulticastBindMem", handle, 0, memory, 0, nbytes, 0)

    def multicast_unbind(self, handle: int, ordinal: int, nbytes: int) -> None:
        self._call("cuMulticastUnbind", handle, self._device(ordinal), 0, nbytes)

    def _multicast(self, devices: int, nbytes: int, sharing: str) -> Any:
        properties = self._bindings.CUmulticastObjectProp()
        properties.numDevices, properties.size, properties.flags = devices, nbytes, 0
        properties.handleTypes = int(self._kind(sharing))
        return properties

    # Kernels given as PTX.

    def load_module(self, ptx: bytes) -> int:
        """Compile zero-terminated PTX for the current context; pairs with `unload_module`."""
        return int(self._call("cuModuleLoadData", ptx))

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def launch(self, module: int, name: str, values: Sequence[int]) -> None:
        """Run one thread of kernel `name` with 64-bit arguments."""
        function = self._call("cuModuleGetFunction", module, name.encode())
        parameters = (tuple(values), (ctypes.c_uint64,) * len(values))
        self._call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, parameters, 0)

    def _kind(self, sharing: str) -> Any:
        return getattr(self._bindings.CUmemAllocationHandleType, f"CU_MEM_HANDLE_TYPE_{sharing}")

    def _shareable(self, ordinal: int, sharing: str) -> Any:
        """Properties of GPU memory that `sharing` handles can share."""
        properties = self._bindings.CUmemAllocationProp()
        properties.type = self._bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self._device(ordinal))
        properties.requestedHandleTypes = self._kind(sharing)
        return properties

    def host_register(self, address: int, nbytes: int) -> int:
        """Pin host memory and return its device address; call `host_unregister` before unmapping the memory."""
        self._call("cuMemHostRegister", address, nbytes, _HOST_PORTABLE_AND_MAPPED)
        try:
            return int(self._call("cuMemHostGetDevicePointer", address, 0))
        except ResourceError:
            self.host_unregister(address)
            raise

    def host_unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def _call(self, name: str, *arguments: object) -> Any:
        try:
            status, *values = getattr(self._bindings, name)(*arguments)
        except (AttributeError, RuntimeError) as error:  # raised by the bindings for a missing library or function
            raise ResourceError(f"{name}: {error}; {INSTALL}") from error
        self._check(name, status)
        if len(values) > 1:
            return tuple(values)
        return values[0] if values else None

    def _check(self, name: str, status: Any) -> None:
        if int(status) == 0:
            return
        error = getattr(status, "name", f"CUresult {int(status)}")
        words = _PLAIN_WORDS.get(error) or self._words_of_cuda(status)
        remedy = _HELP_FOR_CALL.get(name)
        raise ResourceError(f"{name}: {error}: {words}" + (f"; {remedy}" if remedy else ""))

    def _words_of_cuda(self, status: Any) -> str:
        try:
            failed, words = self._bindings.cuGetErrorString(status)
        except (AttributeError, RuntimeError):
            return "no description"
        return bytes(words).decode("utf-8", "replace") if int(failed) == 0 else "unknown error"


class Cleanup:
    """Runs driver calls that undo something: each is tried in `context`, even if others have failed."""

    def __init__(self, driver: Driver, context: int) -> None:
        self.failures: list[ResourceError] = []
        self._driver, self._context = driver, context

    def attempt(self, call: Callable[..., None], *arguments: int) -> bool:
        """Whether the call succeeded; a failure to restore the context does not count."""
        made = False
        try:
            with self._driver.current(self._context):
                call(*arguments)
                made = True
        except ResourceError as error:
            self._failed(error)
        return made

    def release_context(self, ordinal: int) -> None:
        try:
            self._driver.release_context(ordinal)
        except ResourceError as error:
            self._failed(error)

    def _failed(self, error: ResourceError) -> None:
        _log.warning(f"releasing GPU memory: {error}")
        self.failures.append(error)
