"""The part of NVML that concerns links between GPUs: typed, loaded on first use, with every call in one place.

An `Nvml` works on any object with the functions of the module `cuda.bindings.nvml` (12.9.6 and 13.2 are the first that
have it), so tests can substitute one that enforces NVML's rules and still run every line of this file. If the bindings
are older, `MlPy` makes the package nvidia-ml-py (module `pynvml`) look the same. Device handles are ints, valid only
inside `session`. NVML counts all GPUs of the machine (or container) in PCI order and knows nothing of
CUDA_VISIBLE_DEVICES: a UUID is the one name of a device that CUDA and NVML share.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from tricomm.cuda_bindings import bindings_version, load_bindings
from tricomm.errors import ResourceError

REMEDY = "pip install nvidia-ml-py (or cuda-bindings from 13.2 or 12.9.6 on)"

_ACTIVE, _CAN_PEER = 1, 0  # NVML_FEATURE_ENABLED, NVML_NVLINK_CAP_P2P_SUPPORTED
_GPU, _SWITCH, _UNKNOWN = 0, 2, 255  # nvmlIntNvLinkDeviceType_t
_OK, _READ, _WRITE, _NVLINK = 0, 0, 1, 2  # nvmlGpuP2PStatus_t and nvmlGpuP2PCapsIndex_t
_COMPLETED = 3  # nvmlGpuFabricState_t
_STATES = ("not supported", "not started", "in progress", "completed")
_PCI_CLASSES = {0x0300: "gpu", 0x0302: "gpu", 0x0680: "switch"}
_UUID_BYTES = 16
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])")


@dataclass(frozen=True)
class LinkEnd:
    """The far end of an active NVLink: `gpu`, `switch`, `other` (a CPU), or `unseen` if it is unknown.

    `address` is its PCI address as in /sys, or None.
    """

    kind: str
    address: str | None


@dataclass(frozen=True)
class Fabric:
    """A GPU's NVSwitch fabric state, on Hopper and newer: whether it is `ready`, its `domain`, and both in words."""

    ready: bool
    domain: tuple[bytes, int]
    words: str


def load_nvml() -> Nvml:
    """This process's NVML: that of cuda-bindings, else nvidia-ml-py's; raises `ResourceError` if there is neither."""
    try:
        return Nvml(load_bindings("nvml"), source=f"cuda-bindings {bindings_version()}")
    except ResourceError as error:
        reason = str(error).split("; ")[0]
    try:
        module: Any = importlib.import_module("pynvml")
        return Nvml(MlPy(module), source="nvidia-ml-py")
    except (ImportError, AttributeError) as error:
        raise ResourceError(f"NVML: {reason}; pynvml: {error}; {REMEDY}") from None


class MlPy:
    """Gives the package nvidia-ml-py the names of `cuda.bindings.nvml`, as far as `Nvml` uses them."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.NotSupportedError = module.NVMLError_NotSupported
        self.InvalidArgumentError = module.NVMLError_InvalidArgument
        self.NotFoundError = module.NVMLError_NotFound
        self.NVLINK_MAX_LINKS = module.NVML_NVLINK_MAX_LINKS
        self.init_v2, self.shutdown = module.nvmlInit, module.nvmlShutdown
        self.device_get_count_v2 = module.nvmlDeviceGetCount

    def device_get_handle_by_index_v2(self, index: int) -> int:
        return _number(self._module.nvmlDeviceGetHandleByIndex(index))

    def device_get_handle_by_uuid(self, uuid: str) -> int:
        return _number(self._module.nvmlDeviceGetHandleByUUID(uuid.encode()))

    def device_get_name(self, device: int) -> str:
        return _text(self._module.nvmlDeviceGetName(self._handle(device)))

    def device_get_mig_mode(self, device: int) -> Any:
        return self._module.nvmlDeviceGetMigMode(self._handle(device))

    def device_is_mig_device_handle(self, device: int) -> int:
        answer = self._module.nvmlDeviceIsMigDeviceHandle(self._handle(device))
        return int(getattr(answer, "value", answer))  # a ctypes number in all versions so far

    def device_get_pci_info_v3(self, device: int) -> Any:
        return SimpleNamespace(bus_id=_text(self._module.nvmlDeviceGetPciInfo(self._handle(device)).busId))

    def device_get_nvlink_capability(self, device: int, link: int, capability: int) -> int:
        return int(self._module.nvmlDeviceGetNvLinkCapability(self._handle(device), link, capability))

    def device_get_nvlink_state(self, device: int, link: int) -> int:
        return int(self._module.nvmlDeviceGetNvLinkState(self._handle(device), link))

    def device_get_nvlink_remote_device_type(self, device: int, link: int) -> int:
        return int(self._module.nvmlDeviceGetNvLinkRemoteDeviceType(self._handle(device), link))

    def device_get_nvlink_remote_pci_info_v2(self, device: int, link: int) -> Any:
        info = self._module.nvmlDeviceGetNvLinkRemotePciInfo(self._handle(device), link)
        return SimpleNamespace(bus_id=_text(info.busId))

    def device_get_p2p_status(self, device: int, peer: int, index: int) -> int:
        return int(self._module.nvmlDeviceGetP2PStatus(self._handle(device), self._handle(peer), index))

    def device_get_gpu_fabric_info_v(self, device: int) -> Any:
        kind = self._module.c_nvmlGpuFabricInfoV_t
        if kind.clusterUuid.size != _UUID_BYTES:  # before 12.570 the structure differs from the driver's
            raise AttributeError("nvidia-ml-py is too old for NVSwitch fabrics")
        info = kind()
        self._module.nvmlDeviceGetGpuFabricInfoV(self._handle(device), ctypes.byref(info))
        start = kind.clusterUuid.offset  # not through the attribute, which may end at the first zero
        cluster = bytes(info)[start : start + _UUID_BYTES]
        return SimpleNamespace(state=info.state, status=info.status, cluster_uuid=cluster, clique_id=info.cliqueId)

    def _handle(self, device: int) -> Any:
        return ctypes.cast(ctypes.c_void_p(device), self._module.c_nvmlDevice_t)


def _number(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def pci_class(address: str) -> int | None:
    """Class and subclass of the PCI device at `address`, from /sys; None if it is not there, as in many VMs."""
    try:
        return int(Path(f"/sys/bus/pci/devices/{address}/class").read_text(), 16) >> 8
    except (OSError, ValueError):
        return None


class Nvml:
    """NVML's calls. All raise `ResourceError` that names the call and NVML's error, except where None is promised."""

    def __init__(
        self, bindings: Any, pci_class: Callable[[str], int | None] = pci_class, source: str = "cuda-bindings"
    ) -> None:
        self._bindings, self._pci_class = bindings, pci_class
        self.source = source  # name of the package, for messages
        names = ("NotSupportedError", "InvalidArgumentError", "NotFoundError")
        self._absent = tuple(getattr(bindings, name) for name in names)
        self._most_links = int(getattr(bindings, "NVLINK_MAX_LINKS", 18))

    @contextmanager
    def session(self) -> Iterator[None]:
        """A context manager inside which NVML is initialised; sessions may be nested."""
        self._call("init_v2")
        try:
            yield
        finally:
            self._call("shutdown")

    def handles(self) -> list[int]:
        """All GPUs of the machine (or container), in NVML's order."""
        count = int(self._call("device_get_count_v2"))
        return [int(self._call("device_get_handle_by_index_v2", index)) for index in range(count)]

    def handle(self, uuid: bytes) -> int:
        """The device, or MIG instance, with these 16 bytes as its UUID."""
        for prefix in ("GPU", "MIG"):
            try:
                return int(self._bindings.device_get_handle_by_uuid(f"{prefix}-{UUID(bytes=uuid)}"))
            except self._absent:
                continue
            except Exception as error:
                raise _refused("device_get_handle_by_uuid", error) from error
        raise ResourceError(f"NVML knows no device {UUID(bytes=uuid)}: a container must have all GPUs of the group")

    def name(self, device: int) -> str:
        """Product name, or nothing."""
        return str(self._ask("device_get_name", device) or "")

    def is_mig(self, device: int) -> bool:
        """Whether this is a MIG instance, or a GPU that is split into them (which is never used as a whole)."""
        mode = self._ask("device_get_mig_mode", device)
        return bool(self._ask("device_is_mig_device_handle", device)) or bool(mode and int(mode[0]))

    def address(self, device: int) -> str | None:
        """PCI address as in /sys."""
        return _address(self._call("device_get_pci_info_v3", device).bus_id)

    def links(self, device: int) -> list[LinkEnd]:
        """The far ends of the NVLinks that are up and fit for peer access."""
        ends = []
        # A GPU's link numbers cannot be queried; wrong ones are refused. Querying the capability trains the link.
        for link in range(self._most_links):
            try:
                able = self._bindings.device_get_nvlink_capability(device, link, _CAN_PEER)
                active = able and int(self._bindings.device_get_nvlink_state(device, link)) == _ACTIVE
            except self._absent:
                continue
            except Exception as error:
                raise _refused(f"NVLink {link}", error) from error
            if active:
                ends.append(self._end(device, link))
        return ends

    def _end(self, device: int, link: int) -> LinkEnd:
        kind = self._ask("device_get_nvlink_remote_device_type", device, link)  # drivers of the 450s do not have it
        info = self._ask("device_get_nvlink_remote_pci_info_v2", device, link)
        address = None if info is None else _address(info.bus_id)
        if kind in (_GPU, _SWITCH):
            return LinkEnd("gpu" if kind == _GPU else "switch", address)
        if kind not in (None, _UNKNOWN):
            return LinkEnd("other", address)
        pci = None if address is None else self._pci_class(address)
        return LinkEnd("unseen" if pci is None else _PCI_CLASSES.get(pci, "other"), address)

    def nvlink_between(self, device: int, peer: int) -> bool | None:
        """Whether NVML allows peer access over NVLink, by any path; None if it does not report it."""
        status = self._ask("device_get_p2p_status", device, peer, _NVLINK)
        return None if status is None else int(status) == _OK

    def may_access(self, device: int, peer: int) -> bool | None:
        """Whether NVML allows reading and writing the peer's memory, by any path; None if it does not report it."""
        answers = [self._ask("device_get_p2p_status", device, peer, index) for index in (_READ, _WRITE)]
        return None if None in answers else all(int(status) == _OK for status in answers)

    def fabric(self, device: int) -> Fabric | None:
        """The GPU's NVSwitch fabric state; None if there is none (before Hopper) or NVML does not report it."""
        info = self._ask("device_get_gpu_fabric_info_v", device)
        if info is None or not int(info.state):
            return None
        state, status = int(info.state), int(info.status)
        cluster, clique = bytes(bytearray(info.cluster_uuid)), int(info.clique_id)
        words = _STATES[state] if state < len(_STATES) else f"state {state}"
        words += f", cluster {UUID(bytes=cluster)}, clique {clique}" if state == _COMPLETED else ""
        words += f", failed with NVML's error {status}" if state == _COMPLETED and status else ""
        return Fabric(state == _COMPLETED and not status, (cluster, clique), words)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._bindings, name)(*arguments)
        except Exception as error:  # an NVML error, a missing library, or a function that the driver lacks
            raise _refused(name, error) from error

    def _ask(self, name: str, *arguments: Any) -> Any:
        """As `_call`, but None if there is no answer."""
        try:
            return self._call(name, *arguments)
        except ResourceError:
            return None


def _refused(name: str, error: Exception) -> ResourceError:
    return ResourceError(f"NVML: {name}: {type(error).__name__}: {error}".rstrip(": "))


def _address(bus_id: Any) -> str | None:
    """The address as in /sys. NVML gives the domain 8 digits, all ones if the device cannot be seen from a VM."""
    parts = _ADDRESS.fullmatch(str(bus_id).lower())
    return f"{int(parts[1], 16):04x}:{parts[2]}:{parts[3]}.{parts[4]}" if parts else None
