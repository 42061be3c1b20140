"""Reads the topology of this machine: NVLinks from NVML, peer access from CUDA, devices matched by UUID.

If the topology cannot be determined, the result has a reason instead of a guess. Nothing here raises because of
properties of a machine. CUDA has no answer for devices that this process does not see (each rank may see only its own);
for these, NVML's answer on peer access is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from tricomm.errors import InvalidArgument, TricommError
from tricomm.topology.model import MAX_DEVICES, Topology
from tricomm.topology.nvml import Fabric, LinkEnd, Nvml, load_nvml

LinkTable = list[list[int]]


class TorchCuda:
    """Queries torch for the devices. `device_uuid` and `can_access_peer` start CUDA in this process."""

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
    """The topology of a machine, or the reason why it is not known.

    topology  None if it cannot be known
    reason    why not; empty if it is known
    notes     limits and explanations, in words
    fabric    per device of the topology, its NVSwitch fabric state; empty if no device reports it (before Hopper)
    """

    topology: Topology | None
    reason: str = ""
    notes: tuple[str, ...] = ()
    fabric: tuple[str, ...] = ()


def read(cuda: TorchCuda | None = None, nvml: Nvml | None = None) -> Discovery:
    """The topology of the devices that this process sees, in the process's numbering (CUDA_VISIBLE_DEVICES)."""
    cuda = cuda or TorchCuda()
    try:
        uuids = [cuda.device_uuid(ordinal) for ordinal in range(cuda.device_count())]
    except Exception as error:
        return Discovery(None, f"CUDA does not list its devices: {_words(error)}")
    if not uuids:
        return Discovery(None, "this process sees no CUDA device")
    if len(set(uuids)) < len(uuids):
        return Discovery(None, "CUDA gives two devices the same UUID, as it may for MIG instances")
    return of_devices(uuids, cuda, nvml)


def of_devices(uuids: Sequence[bytes], cuda: TorchCuda | None = None, nvml: Nvml | None = None) -> Discovery:
    """The topology of a group whose rank r is on the device of this machine with the UUID `uuids[r]` (16 bytes).

    Equal on all ranks, whichever devices each of them sees, as long as CUDA and NVML agree on peer access. Ranks with
    the same UUID share a device, so it must tell MIG instances apart. Notes number the devices as they first appear.
    Raises `InvalidArgument` for anything but a list of UUIDs.
    """
    if not uuids or not all(isinstance(uuid, bytes) and len(uuid) == 16 for uuid in uuids):
        raise InvalidArgument("devices are named by UUIDs of 16 bytes, one per rank")
    if len(uuids) > MAX_DEVICES:
        return Discovery(None, f"{len(uuids)} devices; {MAX_DEVICES} are the most")
    distinct = list(dict.fromkeys(uuids))
    try:
        nvml = nvml or load_nvml()
        with nvml.session():
            machine = _Probe(distinct, cuda or TorchCuda(), nvml)
            topology, fabric, notes = machine.topology(), machine.fabric(), machine.notes
    except Exception as error:  # an untested version of NVML may raise anything
        if len(distinct) > 1:
            return Discovery(None, _words(error))
        topology, fabric, notes = Topology(((0,),), ((True,),)), (), [_words(error)]
    ranks = [distinct.index(uuid) for uuid in uuids]
    return Discovery(topology.of(ranks), "", tuple(notes), tuple(fabric[rank] for rank in ranks if fabric))


class _Probe:
    """The devices with the given UUIDs, valid during an NVML session."""

    def __init__(self, uuids: list[bytes], cuda: TorchCuda, nvml: Nvml) -> None:
        self.uuids, self.cuda, self.nvml = uuids, cuda, nvml
        self.devices = [nvml.handle(uuid) for uuid in uuids]
        self.mig = [nvml.is_mig(device) for device in self.devices]
        self.notes: list[str] = []
        self.gpus = [self._gpu(device, mig) for device, mig in zip(self.devices, self.mig, strict=True)]
        if any(self.mig):
            devices = _list(index for index, mig in enumerate(self.mig) if mig)
            text = "MIG, so no NVLink and no peer access or CUDA IPC with other instances"
            self.notes.append(f"device {devices}: {text}")
        for words in sorted({gpu.fabric.words for gpu in self.gpus if gpu.fabric and not gpu.fabric.ready}):
            devices = _list(index for index, gpu in enumerate(self.gpus) if gpu.fabric and gpu.fabric.words == words)
            self.notes.append(f"device {devices}: NVSwitch fabric {words}; look at nvidia-fabricmanager")

    def topology(self) -> Topology:
        direct, through, notes = links_between(self.gpus, self._nvlink_allowed)
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

    def _gpu(self, device: int, mig: bool) -> GpuLinks:
        if mig:
            return GpuLinks(None, ())
        return GpuLinks(self.nvml.address(device), self.nvml.links(device), self.nvml.fabric(device))

    def _nvlink_allowed(self, i: int, j: int) -> bool | None:
        both = {self.nvml.nvlink_between(self.devices[a], self.devices[b]) for a, b in ((i, j), (j, i))}
        return False if False in both else None if None in both else True

    def _peers(self) -> tuple[tuple[bool, ...], ...]:
        ordinals: dict[bytes, int] = {}
        try:
            ordinals = {self.cuda.device_uuid(ordinal): ordinal for ordinal in range(self.cuda.device_count())}
        except Exception as error:
            self.notes.append(f"peer access is NVML's answer, because CUDA does not tell: {_words(error)}")
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
                self.notes.append(f"device {i} to {j}: no peer access, because CUDA does not tell: {_words(error)}")
                return False
        allowed = self.nvml.may_access(self.devices[i], self.devices[j])
        if allowed is None:
            self.notes.append(f"device {i} to {j}: no peer access, because neither CUDA nor NVML tells")
        return bool(allowed)


@dataclass(frozen=True)
class GpuLinks:
    """NVML's data on one GPU: its PCI address, the far ends of its links, its NVSwitch fabric state."""

    address: str | None
    ends: Sequence[LinkEnd]
    fabric: Fabric | None = None


def links_between(
    gpus: Sequence[GpuLinks], allowed: Callable[[int, int], bool | None]
) -> tuple[LinkTable, LinkTable, list[str]]:
    """Links of each pair, directly and through switches, and notes in words. Pure.

    `allowed(i, j)` is NVML's answer on peer access over NVLink, or None. If it is False, the pair counts as unlinked,
    because peers cannot use the links. It is called only for pairs with links.
    """
    direct = [[0] * len(gpus) for _ in gpus]
    through = [[0] * len(gpus) for _ in gpus]
    notes: list[str] = []
    known = {gpu.address for gpu in gpus}
    for i, one in enumerate(gpus):
        for j, other in enumerate(gpus[:i]):
            there, back = _ends_at(one, other.address), _ends_at(other, one.address)
            sure, likely = (min(_to_switches(gpu, known, unseen) for gpu in (one, other)) for unseen in (False, True))
            if not there and not back and not likely:
                continue
            if there != back:
                notes.append(f"devices {j} and {i} see {back} and {there} links to each other; the fewer count")
            answer = allowed(i, j)
            if answer is False:
                notes.append(f"devices {j} and {i}: linked, but NVML forbids peer access over NVLink")
                continue
            direct[i][j] = direct[j][i] = min(there, back)
            if _joined(one.fabric, other.fabric):
                # In a VM switches are not visible: an unnamed end counts as a switch if NVML confirms access between
                # the pair.
                affirmed = answer is True and not direct[i][j]
                through[i][j] = through[j][i] = likely if affirmed else sure
    return direct, through, notes


def _ends_at(gpu: GpuLinks, address: str | None) -> int:
    return sum(end.address == address and end.kind in ("gpu", "unseen") for end in gpu.ends if address is not None)


def _to_switches(gpu: GpuLinks, known: set[str | None], unseen: bool) -> int:
    return sum(
        end.kind == "switch" or (unseen and end.kind == "unseen" and (end.address is None or end.address not in known))
        for end in gpu.ends
    )


def _joined(one: Fabric | None, other: Fabric | None) -> bool:
    """Whether switches join two GPUs. If neither GPU reports its fabric (before Hopper), all switches of a machine
    count as joined."""
    told = [fabric for fabric in (one, other) if fabric is not None]
    return all(fabric.ready for fabric in told) and len({fabric.domain for fabric in told}) <= 1


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, TricommError) else f"{type(error).__name__}: {error}".rstrip(": ")
