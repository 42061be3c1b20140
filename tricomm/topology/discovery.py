"""Reads the topology of this machine: NVLinks from NVML, peer access from CUDA, devices matched by UUID.

What cannot be known is not guessed: there is no topology then, but a reason. Nothing here raises for what a machine has
or lacks. Peer access between devices that this process does not see (each rank may see its own only) is NVML's word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from tricomm.errors import InvalidArgument, TricommError
from tricomm.topology import nvlinks
from tricomm.topology.model import MAX_DEVICES, Topology
from tricomm.topology.nvml import Nvml, load_nvml


class Cuda(Protocol):
    """CUDA's devices, as this process numbers them; `store.cuda_driver.Driver` is one, too, after its `init`."""

    def device_count(self) -> int: ...

    def device_uuid(self, ordinal: int) -> bytes: ...

    def can_access_peer(self, ordinal: int, peer_ordinal: int) -> bool: ...


class TorchCuda:
    """What torch says of the devices. The last two start CUDA in this process."""

    def device_count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def device_uuid(self, ordinal: int) -> bytes:
        import torch

        return UUID(str(torch.cuda.get_device_properties(ordinal).uuid).removeprefix("GPU-")).bytes

    def can_access_peer(self, ordinal: int, peer_ordinal: int) -> bool:
        import torch

        return bool(torch.cuda.can_device_access_peer(ordinal, peer_ordinal))


@dataclass(frozen=True)
class Discovery:
    """What was found.

    topology  or None, where it cannot be known
    reason    why not; empty where it is known
    notes     what limits or explains what was found, in words
    fabric    per device of the topology: its state among NVSwitches; empty where no device tells (before Hopper)
    """

    topology: Topology | None
    reason: str = ""
    notes: tuple[str, ...] = ()
    fabric: tuple[str, ...] = ()


def read(cuda: Cuda | None = None, nvml: Nvml | None = None) -> Discovery:
    """The topology of the devices that this process sees, in its own numbering (CUDA_VISIBLE_DEVICES in any order)."""
    cuda = cuda or TorchCuda()
    try:
        uuids = [cuda.device_uuid(ordinal) for ordinal in range(cuda.device_count())]
    except Exception as error:
        return Discovery(None, f"CUDA does not say what devices there are: {_words(error)}")
    if not uuids:
        return Discovery(None, "this process sees no CUDA device")
    if len(set(uuids)) < len(uuids):
        return Discovery(None, "CUDA gives two devices the same UUID, as it may for MIG instances")
    return of_devices(uuids, cuda, nvml)


def of_devices(uuids: Sequence[bytes], cuda: Cuda | None = None, nvml: Nvml | None = None) -> Discovery:
    """The topology of a group whose rank r is on the device of this machine with the UUID `uuids[r]` (16 bytes).

    Equal on all ranks, whatever each of them sees, as long as CUDA and NVML agree on peer access. Ranks with the same
    UUID share a device, so it must tell MIG instances apart. Notes number the devices as they first appear.
    Raises `InvalidArgument` for what is no list of UUIDs.
    """
    if not uuids or not all(isinstance(uuid, bytes) and len(uuid) == 16 for uuid in uuids):
        raise InvalidArgument("devices are named by UUIDs of 16 bytes, one per rank")
    if len(uuids) > MAX_DEVICES:
        return Discovery(None, f"{len(uuids)} devices; {MAX_DEVICES} are the most")
    distinct = list(dict.fromkeys(uuids))
    try:
        nvml = nvml or load_nvml()
        with nvml.session():
            machine = _Machine(distinct, cuda or TorchCuda(), nvml)
            topology, fabric, notes = machine.topology(), machine.fabric(), machine.notes
    except Exception as error:  # also what a version of NVML that nobody has tried may answer
        if len(distinct) > 1:
            return Discovery(None, _words(error))
        topology, fabric, notes = Topology(((0,),), ((True,),)), (), [_words(error)]
    ranks = [distinct.index(uuid) for uuid in uuids]
    return Discovery(topology.of(ranks), "", tuple(notes), tuple(fabric[rank] for rank in ranks if fabric))


class _Machine:
    """The devices with the given UUIDs, while NVML's session lasts."""

    def __init__(self, uuids: list[bytes], cuda: Cuda, nvml: Nvml) -> None:
        self.uuids, self.cuda, self.nvml = uuids, cuda, nvml
        self.devices = [nvml.handle(uuid) for uuid in uuids]
        self.mig = [nvml.is_mig(device) for device in self.devices]
        self.notes: list[str] = []
        self.gpus = [self._gpu(device, mig) for device, mig in zip(self.devices, self.mig, strict=True)]
        if any(self.mig):
            who = _list(index for index, mig in enumerate(self.mig) if mig)
            self.notes.append(f"device {who}: MIG, so no NVLink and no peer access or CUDA IPC with other instances")
        for words in sorted({gpu.fabric.words for gpu in self.gpus if gpu.fabric and not gpu.fabric.ready}):
            who = _list(index for index, gpu in enumerate(self.gpus) if gpu.fabric and gpu.fabric.words == words)
            self.notes.append(f"device {who}: NVSwitch fabric {words}; look at nvidia-fabricmanager")

    def topology(self) -> Topology:
        direct, through, notes = nvlinks.between(self.gpus, self._nvlink_allowed)
        self.notes += notes
        size = range(len(self.gpus))
        return Topology(
            links=tuple(tuple(direct[i][j] + through[i][j] for j in size) for i in size),
            peers=self._peers(),
            switched=len(size) > 1 and all(through[i][j] and not direct[i][j] for i in size for j in size if i != j),
            names=tuple("".join(filter(str.isprintable, self.nvml.name(device))) for device in self.devices),
        )

    def fabric(self) -> tuple[str, ...]:
        if not any(gpu.fabric for gpu in self.gpus):
            return ()
        return tuple(gpu.fabric.words if gpu.fabric else "not told" for gpu in self.gpus)

    def _gpu(self, device: int, mig: bool) -> nvlinks.Gpu:
        if mig:
            return nvlinks.Gpu(None, ())
        return nvlinks.Gpu(self.nvml.address(device), self.nvml.links(device), self.nvml.fabric(device))

    def _nvlink_allowed(self, i: int, j: int) -> bool | None:
        both = {self.nvml.nvlink_between(self.devices[a], self.devices[b]) for a, b in ((i, j), (j, i))}
        return False if False in both else None if None in both else True

    def _peers(self) -> tuple[tuple[bool, ...], ...]:
        ordinals: dict[bytes, int] = {}
        try:
            ordinals = {self.cuda.device_uuid(ordinal): ordinal for ordinal in range(self.cuda.device_count())}
        except Exception as error:
            self.notes.append(f"peer access is NVML's word, for CUDA does not tell: {_words(error)}")
        size = range(len(self.devices))
        return tuple(tuple(i == j or self._peer(i, j, ordinals) for j in size) for i in size)

    def _peer(self, i: int, j: int, ordinals: dict[bytes, int]) -> bool:
        if self.mig[i] or self.mig[j]:
            return False
        mine, other = ordinals.get(self.uuids[i]), ordinals.get(self.uuids[j])
        if mine is not None and other is not None:
            try:
                return bool(self.cuda.can_access_peer(mine, other))
            except Exception as error:
                self.notes.append(f"device {i} to {j}: no peer access, for CUDA does not tell: {_words(error)}")
                return False
        allowed = self.nvml.may_access(self.devices[i], self.devices[j])
        if allowed is None:
            self.notes.append(f"device {i} to {j}: no peer access, for neither CUDA nor NVML tells")
        return bool(allowed)


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, TricommError) else f"{type(error).__name__}: {error}".rstrip(": ")
