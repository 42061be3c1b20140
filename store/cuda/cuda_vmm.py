"""Memory that the ranks' processes share on GPUs, by descriptors of physical memory (CUDA's virtual memory management).

    rank 0: cuMemCreate, cuMemMap ── descriptor, over a Unix socket ──▶ rank 1: import, cuMemMap ── writes a word ──▶

Needs no common PID or IPC namespace, and ends alone: memory lives until its last mapping, handle and descriptor is
gone. What is made first goes last: addresses are unmapped, then the handle released, then the addresses freed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tricomm.deadline import Deadline
from tricomm.errors import RendezvousError, ResourceError
from tricomm.store.collective_stages import pass_descriptors
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_arena import CudaArena, GpuSite, open_blocks
from tricomm.store.cuda.cuda_driver import UUID_BYTES, Cleanup, Driver
from tricomm.store.descriptors import DescriptorSocket
from tricomm.store.records import NAME_BYTES

_MAGIC = b"TCVM"
_VERSION = 1
_RECORD = struct.Struct(f"<4sHH{UUID_BYTES}sQQ{NAME_BYTES}s")
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
        return _RECORD.pack(_MAGIC, _VERSION, self.rank, self.uuid, self.nbytes, self.whole, self.socket)


def parse_record(data: bytes, rank: int, nbytes: int) -> VmmRecord:
    """Rank `rank`'s record for a block of `nbytes` bytes; raises `RendezvousError` for anything else. Pure."""
    if len(data) != _RECORD.size:
        raise RendezvousError(f"rank {rank}'s memory record has {len(data)} bytes, expected {_RECORD.size}")
    magic, version, sender, uuid, size, whole, name = _RECORD.unpack(data)
    if magic != _MAGIC or version != _VERSION:
        raise RendezvousError(f"rank {rank}'s memory record is not of version {_VERSION}: mixed tricomm versions?")
    if sender != rank:
        raise RendezvousError(f"rank {rank}'s memory record says that it is rank {sender}'s")
    if size != nbytes:
        raise RendezvousError(f"rank {rank} shares {size} bytes, this rank shares {nbytes}: use the same size")
    if not size <= whole <= _MOST:
        raise RendezvousError(f"rank {rank} shares {whole} bytes for a block of {size}: not what CUDA gives")
    return VmmRecord(rank, uuid, size, whole, name)


class _Mapped:
    """Memory at an address of this process: what has been done so far, so that it can be undone in the right order."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver, self._nbytes = driver, nbytes
        self.address = 0
        self.handles: list[int] = []  # at most one
        self._there = False

    def put(self, ordinal: int, alignment: int) -> None:
        """Map the memory of the handle for GPU `ordinal`."""
        self.address = self._driver.address_reserve(self._nbytes, alignment)
        self._driver.mem_map(self.address, self._nbytes, self.handles[0])
        self._there = True
        self._driver.mem_allow(self.address, self._nbytes, ordinal)

    def release(self, undo: Cleanup) -> None:
        """Each step is tried; addresses with something behind them stay reserved."""
        gone = undo.attempt(self._driver.mem_unmap, self.address, self._nbytes) if self._there else True
        while self.handles:
            undo.attempt(self._driver.mem_release, self.handles.pop())
        if self.address and gone:
            undo.attempt(self._driver.address_free, self.address, self._nbytes)


class VmmBlocks:
    """This rank's memory, and the others', mapped here."""

    kind = "cuda_vmm"

    def __init__(self, control: ControlPage, nbytes: int) -> None:
        self._control, self._nbytes = control, nbytes
        self._site: GpuSite | None = None
        self._granularity = 0
        self._mapped: list[_Mapped] = []  # the own one first
        self._exported: list[int] = []
        self._passing = DescriptorSocket()

    def allocate(self, site: GpuSite) -> bytes:
        self._site, driver = site, site.driver
        refusal = driver.vmm_refusal(site.ordinal)
        if refusal is not None:
            raise ResourceError(refusal)
        self._granularity = driver.granularity(site.ordinal)
        whole = -(-self._nbytes // self._granularity) * self._granularity
        own = self._mapping(whole)
        own.handles.append(driver.mem_create(site.ordinal, whole))
        own.put(site.ordinal, self._granularity)
        driver.memset(own.address, 0, whole)
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
        addresses = {self._control.rank: self._mapped[0].address}

        def take(rank: int, held: list[int]) -> None:
            addresses[rank] = self._map_peer(peers[rank], held[0]) if reach[rank] else 0

        names = [peer.socket for peer in peers]
        pass_descriptors(self._control, self._passing, names, self._exported, take, self.kind, deadline)
        self._passing.close()
        self._close_exported()
        return tuple(addresses[rank] for rank in range(len(peers)))

    def _map_peer(self, peer: VmmRecord, fd: int) -> int:
        assert self._site is not None, "allocate comes first"
        self._site.refuse_unreachable(peer.rank, peer.uuid)
        block = self._mapping(peer.whole)
        try:
            block.handles.append(self._site.driver.import_descriptor(fd))
            block.put(self._site.ordinal, self._granularity)
        except ResourceError as error:
            raise ResourceError(f"rank {peer.rank}'s memory cannot be mapped: {error}") from error
        return block.address

    def _mapping(self, nbytes: int) -> _Mapped:
        assert self._site is not None, "allocate comes first"
        self._mapped.append(_Mapped(self._site.driver, nbytes))
        return self._mapped[-1]

    def keep(self) -> None:
        """Nothing to do: what is mapped here lives without its owner, and there without this rank."""

    def release(self, undo: Cleanup) -> bool:
        self._passing.abandon()
        self._close_exported()
        while self._mapped:
            self._mapped.pop().release(undo)
        return True

    def _close_exported(self) -> None:
        while self._exported:
            os.close(self._exported.pop())
