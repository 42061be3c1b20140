"""NVML, as far as links between GPUs go: typed, loaded on first use, every call in one place.

An `Nvml` works on whatever looks like the module `cuda.bindings.nvml` (12.9.6 and 13.2 are the first that have it), so
that tests put one that enforces NVML's rules in its place and still run every line of this file. Device handles are
ints, good inside `session` only. NVML counts all GPUs of the machine (or container) in PCI order and knows nothing of
CUDA_VISIBLE_DEVICES: a UUID is the one name of a device that CUDA and NVML share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from tricomm.errors import ResourceError

_ACTIVE, _CAN_PEER = 1, 0  # NVML_FEATURE_ENABLED, NVML_NVLINK_CAP_P2P_SUPPORTED
_GPU, _SWITCH, _UNKNOWN = 0, 2, 255  # nvmlIntNvLinkDeviceType_t
_OK, _READ, _WRITE, _NVLINK = 0, 0, 1, 2  # nvmlGpuP2PStatus_t and nvmlGpuP2PCapsIndex_t
_COMPLETED = 3  # nvmlGpuFabricState_t
_STATES = ("not supported", "not started", "in progress", "completed")
_PCI_CLASSES = {0x0300: "gpu", 0x0302: "gpu", 0x0680: "switch"}
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])")


@dataclass(frozen=True)
class End:
    """The far end of an active NVLink: `gpu`, `switch`, `other` (a CPU), or `unseen`, where nothing tells.

    `address` is its PCI address as in /sys, or None.
    """

    kind: str
    address: str | None


@dataclass(frozen=True)
class Fabric:
    """A GPU's place among NVSwitches, Hopper and newer: `ready` to be used, where (`domain`), and the same in words."""

    ready: bool
    domain: tuple[bytes, int]
    words: str


def load_nvml() -> Nvml:
    """This process's NVML; raises `ResourceError` where the Python package has none."""
    try:
        from cuda.bindings import nvml
    except ImportError as error:
        raise ResourceError(f"NVML: {error}; `pip install 'cuda-bindings>=13.2'` (or 12.9.6 and newer of 12)") from None
    return Nvml(nvml)


def pci_class(address: str) -> int | None:
    """Class and subclass of the PCI device at `address`, from /sys; None where it is not there, as in many VMs."""
    try:
        return int(Path(f"/sys/bus/pci/devices/{address}/class").read_text(), 16) >> 8
    except (OSError, ValueError):
        return None


class Nvml:
    """NVML's calls. All raise `ResourceError` that names the call and NVML's error, except where None is promised."""

    def __init__(self, bindings: Any, pci_class: Callable[[str], int | None] = pci_class) -> None:
        self._bindings, self._pci_class = bindings, pci_class
        names = ("NotSupportedError", "InvalidArgumentError", "NotFoundError")
        self._absent = tuple(getattr(bindings, name) for name in names)
        self._most_links = int(getattr(bindings, "NVLINK_MAX_LINKS", 18))

    @contextmanager
    def session(self) -> Iterator[None]:
        """NVML is ready inside; sessions may be nested."""
        self._call("init_v2")
        try:
            yield
        finally:
            self._call("shutdown")

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

    def links(self, device: int) -> list[End]:
        """The far ends of the NVLinks that are up and fit for peer access."""
        ends = []
        # What numbers a GPU has cannot be asked for; wrong ones are refused. Asking for the ability trains the link.
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

    def _end(self, device: int, link: int) -> End:
        kind = self._ask("device_get_nvlink_remote_device_type", device, link)  # drivers of the 450s do not have it
        info = self._ask("device_get_nvlink_remote_pci_info_v2", device, link)
        address = None if info is None else _address(info.bus_id)
        if kind in (_GPU, _SWITCH):
            return End("gpu" if kind == _GPU else "switch", address)
        if kind not in (None, _UNKNOWN):
            return End("other", address)
        found = None if address is None else self._pci_class(address)
        return End("unseen" if found is None else _PCI_CLASSES.get(found, "other"), address)

    def nvlink_between(self, device: int, peer: int) -> bool | None:
        """Whether NVML allows peer access over NVLink, by whatever path; None where it does not tell."""
        status = self._ask("device_get_p2p_status", device, peer, _NVLINK)
        return None if status is None else int(status) == _OK

    def may_access(self, device: int, peer: int) -> bool | None:
        """Whether NVML allows reading and writing the peer's memory, by whatever way; None where it does not tell."""
        found = [self._ask("device_get_p2p_status", device, peer, index) for index in (_READ, _WRITE)]
        return None if None in found else all(int(status) == _OK for status in found)

    def fabric(self, device: int) -> Fabric | None:
        """The GPU's place among NVSwitches; None where there is no such thing (before Hopper) or NVML does not tell."""
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
        except Exception as error:  # its own, a missing library, a function that the driver does not have
            raise _refused(name, error) from error

    def _ask(self, name: str, *arguments: Any) -> Any:
        """As `_call`, but None where there is no answer."""
        try:
            return self._call(name, *arguments)
        except ResourceError:
            return None


def _refused(name: str, error: Exception) -> ResourceError:
    return ResourceError(f"NVML: {name}: {type(error).__name__}: {error}".rstrip(": "))


def _address(bus_id: Any) -> str | None:
    """As in /sys: NVML gives the domain 8 digits, and ones where the device cannot be seen from a VM."""
    found = _ADDRESS.fullmatch(str(bus_id).lower())
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}.{found[4]}" if found else None
