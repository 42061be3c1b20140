"""Memory that the ranks' processes share on GPUs, by descriptors of physical memory (CUDA's virtual memory management).

    rank 0: cuMemCreate, cuMemMap ── descriptor, over a Unix socket ──▶ rank 1: import, cuMemMap ── writes a word ──▶

Needs no common PID or IPC namespace, and ends alone: memory lives until its last mapping, handle and descriptor is
gone. Memory that has been given back comes again by the same way, at the addresses that were kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tricomm.deadline import Deadline
from tricomm.errors import RendezvousError, ResourceError
from tricomm.store.collective_stages import pass_descriptors
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_arena import CudaArena, GpuSite, open_blocks
from tricomm.store.cuda.cuda_driver import Cleanup, Driver
from tricomm.store.cuda.cuda_multicast import Multicast
from tricomm.store.cuda.mapped_memory import MappedMemory
from tricomm.store.cuda.memory_records import RecordFormat
from tricomm.store.descriptors import DescriptorSocket
from tricomm.store.records import NAME_BYTES

_FORMAT = RecordFormat(b"TCVM", f"Q{NAME_BYTES}s")
_MOST = 1 << 47


def open_cuda_vmm(
    control: ControlPage, nbytes: int, device: torch.device, timeout: float, driver: Driver | None = None,
    reach: Sequence[bool] | None = None,
) -> CudaArena:  # fmt: skip
    """`open_blocks` of memory that is shared by descriptors. Raises `ResourceError` also if a GPU cannot do that."""
    return open_blocks(control, nbytes, device, timeout, driver, reach, lambda: VmmBlocks(control, nbytes))


@dataclass(frozen=True)
class VmmRecord:
    """A rank's block of GPU memory, as the other ranks are told of it: `whole` bytes on the GPU `uuid`, and the name of
    the socket at which it takes the others' descriptors."""

    rank: int
    uuid: bytes
    nbytes: int
    whole: int
    socket: bytes

    def pack(self) -> bytes:
        return _FORMAT.pack(self.rank, self.uuid, self.nbytes, self.whole, self.socket)


def parse_record(data: bytes, rank: int, nbytes: int) -> VmmRecord:
    """Rank `rank`'s record for a block of `nbytes` bytes; raises `RendezvousError` for anything else. Pure."""
    uuid, whole, name = _FORMAT.parse(data, rank, nbytes)
    if not nbytes <= whole <= _MOST:
        raise RendezvousError(f"rank {rank} shares {whole} bytes for a block of {nbytes}: not what CUDA gives")
    return VmmRecord(rank, uuid, nbytes, whole, name)


class VmmBlocks:
    """This rank's memory, and the others', mapped here."""

    kind = "cuda_vmm"
    no_suspend = ""

    def __init__(self, control: ControlPage, nbytes: int) -> None:
        self._control, self._nbytes = control, nbytes
        self._site: GpuSite | None = None
        self._granularity = 0
        self._mapped: dict[int, MappedMemory] = {}  # by rank, the own one first
        self._exported: list[int] = []
        self._passing = DescriptorSocket()
        self._switch: Multicast | None = None

    def allocate(self, site: GpuSite) -> bytes:
        self._site, driver = site, site.driver
        refusal = driver.vmm_refusal(site.ordinal)
        if refusal is not None:
            raise ResourceError(refusal)
        self._granularity = driver.granularity(site.ordinal)
        whole = -(-self._nbytes // self._granularity) * self._granularity
        own = self._mapping(self._control.rank, whole)
        own.make(site.ordinal, self._granularity)
        driver.synchronize()
        if self._control.world_size > 1:
            self._exported.append(driver.export_descriptor(own.handles[0]))
            os.set_inheritable(self._exported[0], False)
            self._passing.bind()
        uuid = driver.device_uuid(site.ordinal)
        return VmmRecord(self._control.rank, uuid, self._nbytes, whole, self._passing.name).pack()

    def shared(self) -> None:
        pass

    def map(self, records: Sequence[bytes], reach: Sequence[bool], deadline: Deadline) -> tuple[int, ...]:
        peers = [parse_record(data, rank, self._nbytes) for rank, data in enumerate(records)]
        addresses = {self._control.rank: self._mapped[self._control.rank].address}

        def take(rank: int, held: list[int]) -> None:
            addresses[rank] = self._map_peer(peers[rank], held[0]) if reach[rank] else 0

        names = [peer.socket for peer in peers]
        pass_descriptors(self._control, self._passing, names, self._exported, take, self.kind, deadline)
        self._passing.close()
        self._close_exported()
        return tuple(addresses[rank] for rank in range(len(peers)))

    def multicast(self, probe: int, deadline: Deadline) -> int:
        site = self._site
        assert site is not None, "allocate comes first"
        if self._switch is None:
            self._switch = Multicast(self._control, site, self._mapped[self._control.rank])
        try:
            return self._switch.share(probe, deadline)
        except BaseException:
            undo = Cleanup(site.driver, site.context)
            undo.attempt(site.driver.synchronize)
            self._switch.give_back(undo)
            raise

    def _map_peer(self, peer: VmmRecord, fd: int) -> int:
        assert self._site is not None, "allocate comes first"
        self._site.refuse_unreachable(peer.rank, peer.uuid)
        block = self._mapping(peer.rank, peer.whole)
        try:
            block.handles.append(self._site.driver.import_descriptor(fd))
            block.put(self._site.ordinal, self._granularity)
        except ResourceError as error:
            raise ResourceError(f"rank {peer.rank}'s memory cannot be mapped: {error}") from error
        return block.address

    def _mapping(self, rank: int, nbytes: int) -> MappedMemory:
        """Addresses for rank `rank`'s memory: those that were kept, if there are any."""
        site = self._site
        assert site is not None, "allocate comes first"
        block = self._mapped.setdefault(rank, MappedMemory(site.driver, nbytes))
        if block.nbytes != nbytes:
            raise RendezvousError(f"rank {rank} shares {nbytes} bytes, and before it was suspended {block.nbytes}")
        block.require_empty(Cleanup(site.driver, site.context))
        return block

    def give_back(self, undo: Cleanup) -> None:
        if self._switch is not None:
            self._switch.give_back(undo)
        self._passing.abandon()
        self._close_exported()
        for block in self._mapped.values():
            block.empty(undo)

    def keep(self) -> None:
        """Nothing to do: what is mapped here lives without its owner, and there without this rank."""

    def release(self, undo: Cleanup) -> bool:
        if self._switch is not None:
            self._switch.release(undo)
        self._passing.abandon()
        self._close_exported()
        while self._mapped:
            self._mapped.popitem()[1].release(undo)
        return True

    def _close_exported(self) -> None:
        while self._exported:
            os.close(self._exported.pop())
