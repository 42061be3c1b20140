"""A fake of nvidia-ml-py (module `pynvml`) over a `FakeNvml`: it has other names and types.

Handles are pointers, texts may be bytes, an answer may be a ctypes number, and a structure is filled through a pointer.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

from tests.topology import fake_nvml
from tests.topology.fake_nvml import FakeNvml
from tricomm.topology.nvml import MlPy, Nvml


class _Device(ctypes.Structure):
    pass


class c_nvmlGpuFabricInfoV_t(ctypes.Structure):
    """As of 12.570: the UUID is text that ends at its first zero."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_char * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("healthMask", ctypes.c_uint32),
    ]

    def __init__(self) -> None:
        super().__init__(version=0x02000024)


class c_old_fabric_info(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("clusterUuid", ctypes.c_char * 80)]


class FakeMlPy:
    """The module."""

    NVMLError_NotSupported = fake_nvml.NotSupportedError
    NVMLError_InvalidArgument = fake_nvml.InvalidArgumentError
    NVMLError_NotFound = fake_nvml.NotFoundError
    NVML_NVLINK_MAX_LINKS = 36
    c_nvmlDevice_t = ctypes.POINTER(_Device)
    c_nvmlGpuFabricInfoV_t: Any = c_nvmlGpuFabricInfoV_t

    def __init__(self, world: FakeNvml) -> None:
        self.world = world
        self.nvmlInit, self.nvmlShutdown = world.init_v2, world.shutdown

    def nvml(self) -> Nvml:
        return Nvml(MlPy(self), self.world.classes.get, "nvidia-ml-py")

    def nvmlDeviceGetCount(self) -> int:
        return self.world.device_get_count_v2()

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._pointer(self.world.device_get_handle_by_index_v2(index))

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> Any:
        return self._pointer(self.world.device_get_handle_by_uuid(uuid.decode()))

    def nvmlDeviceGetName(self, handle: Any) -> bytes:
        return self.world.device_get_name(self._number(handle)).encode()

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        return list(self.world.device_get_mig_mode(self._number(handle)))

    def nvmlDeviceIsMigDeviceHandle(self, handle: Any) -> Any:
        return ctypes.c_uint(self.world.device_is_mig_device_handle(self._number(handle)))

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return SimpleNamespace(busId=self.world.device_get_pci_info_v3(self._number(handle)).bus_id.encode())

    def nvmlDeviceGetNvLinkCapability(self, handle: Any, link: int, capability: int) -> int:
        return self.world.device_get_nvlink_capability(self._number(handle), link, capability)

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:
        return self.world.device_get_nvlink_state(self._number(handle), link)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int:
        return self.world.device_get_nvlink_remote_device_type(self._number(handle), link)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any:
        info = self.world.device_get_nvlink_remote_pci_info_v2(self._number(handle), link)
        return SimpleNamespace(busId=info.bus_id.encode())

    def nvmlDeviceGetP2PStatus(self, handle: Any, peer: Any, index: int) -> int:
        return self.world.device_get_p2p_status(self._number(handle), self._number(peer), index)

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, pointer: Any) -> int:
        assert type(pointer).__name__ == "CArgObject", "a structure is passed by reference, else NVML fills a copy"
        given = self.world.device_get_gpu_fabric_info_v(self._number(handle))
        info = pointer._obj
        start = type(info).clusterUuid.offset
        ctypes.memmove(ctypes.addressof(info) + start, bytes(given.cluster_uuid), 16)
        info.state, info.status, info.cliqueId = given.state, given.status, given.clique_id
        return 0

    def _pointer(self, number: int) -> Any:
        return ctypes.cast(ctypes.c_void_p(number), self.c_nvmlDevice_t)

    def _number(self, handle: Any) -> int:
        assert isinstance(handle, self.c_nvmlDevice_t), f"{handle!r} is not what this package calls a device"
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
