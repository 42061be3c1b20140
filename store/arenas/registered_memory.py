"""A user's GPU memory, shared in place: the CUDA allocations that hold it are passed to the peers, and nothing is
copied.

    cuMemCreate: a descriptor of each allocation (torch's expandable segments, symmetric memory) ──▶ peers map them
    cuMemAlloc:  the handle of the allocation, by legacy CUDA IPC (torch's usual segments) ──▶ peers open it

A peer maps whole allocations, including the user's other tensors in them. The user's memory has to outlive the
mappings. No write probe is needed: the set-up of the group's arena has shown that writes arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tricomm.deadline import Deadline
from tricomm.errors import RendezvousError, ResourceError
from tricomm.store.arenas.arena import NOT_BOUND, RecordFormat
from tricomm.store.arenas.cuda_arena import Blocks, CudaArena, GpuSite, open_blocks
from tricomm.store.arenas.cuda_ipc import IpcBlocks
from tricomm.store.arenas.passing import DescriptorPassing, export
from tricomm.store.collective_stages import CollectiveStages
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import UUID_BYTES, Cleanup, Driver, load_driver
from tricomm.store.records import NAME_BYTES

MOST_PIECES = 8  # descriptors in a message
_FORMAT = RecordFormat(b"TCRM", f"{UUID_BYTES}sQ{MOST_PIECES}Q{NAME_BYTES}s")
_MOST = 1 << 47
_REMEDY = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, torch's symmetric memory and comm.symmetric() can be shared"
)


def open_registered_gpu(
    control: ControlPage, address: int, nbytes: int, device: torch.device, timeout: float, driver: Driver | None = None
) -> CudaArena:
    """Map the `nbytes` bytes at `address` of each rank's GPU on all ranks; called by all ranks together.

    Takes about `timeout` seconds at most. Raises the same error on all ranks, with everything undone: `ResourceError`
    if CUDA cannot share this memory, or cannot share it in the same way on all ranks.
    """
    deadline = Deadline(timeout)
    used, ordinal = driver or load_driver(), int(device.index or 0)

    def way() -> bytes:
        used.init()
        context = used.retain_context(ordinal)
        try:
            with used.current(context):
                return b"by descriptor" if _retained(used, address) else b"by legacy CUDA IPC"
        finally:
            used.release_context(ordinal)

    ways = CollectiveStages(control, "register", deadline).gather("look at the memory", way)
    if len(set(ways)) > 1:
        told = ", ".join(f"rank {rank} {name.decode()}" for rank, name in enumerate(ways))
        raise ResourceError(f"register: the ranks' memory is of different kinds ({told}): use one allocator")

    def blocks() -> TensorPieces | IpcBlocks:
        if ways[0] == b"by descriptor":
            return TensorPieces(control, address, nbytes)
        return IpcBlocks(control, nbytes, address)

    try:
        arena = open_blocks(control, nbytes, device, deadline.left, driver, None, blocks, probe=False)
    except ResourceError as error:
        raise ResourceError(f"register: {error}; {_REMEDY}") from error
    arena.no_multicast = NOT_BOUND
    return arena


def _retained(driver: Driver, address: int) -> bool:
    """Whether the memory was allocated by cuMemCreate."""
    try:
        driver.mem_release(driver.retain_handle(address))
    except ResourceError:
        return False
    return True


@dataclass(frozen=True)
class PiecesRecord:
    """The data with which other ranks map the allocations that hold a rank's memory: their `sizes`, in address order.
    The memory begins `offset` bytes into the first one."""

    rank: int
    uuid: bytes
    nbytes: int
    offset: int
    sizes: tuple[int, ...]
    socket: bytes

    def pack(self) -> bytes:
        sizes = (*self.sizes, *[0] * (MOST_PIECES - len(self.sizes)))
        return _FORMAT.pack(self.rank, self.nbytes, self.uuid, self.offset, *sizes, self.socket)


def parse_pieces(data: bytes, rank: int, nbytes: int) -> PiecesRecord:
    """Rank `rank`'s record for memory of `nbytes` bytes; raises `RendezvousError` for anything else. Pure."""
    uuid, offset, *sizes, name = _FORMAT.parse(data, rank, nbytes)
    count = next((n for n, piece in enumerate(sizes) if not piece), MOST_PIECES)
    if not count or any(sizes[count:]) or sum(sizes) > _MOST or offset >= sizes[0] or offset + nbytes > sum(sizes):
        raise RendezvousError(f"rank {rank}'s {nbytes} bytes are not in the allocations that it has sent")
    return PiecesRecord(rank, uuid, nbytes, offset, tuple(sizes[:count]), name)


class TensorPieces(Blocks):
    """The allocations that hold a user's memory, of all ranks, mapped here."""

    kind = "cuda_vmm"
    no_suspend = "registered memory is the user's"
    no_multicast = NOT_BOUND

    def __init__(self, control: ControlPage, address: int, nbytes: int) -> None:
        self._control, self._address, self._nbytes = control, address, nbytes
        self._handles: list[int] = []
        self._mapped: list[tuple[int, int]] = []
        self._reserved: list[tuple[int, int]] = []
        self._passing = DescriptorPassing(control, "registered memory")

    def allocate(self, site: GpuSite) -> bytes:
        self._site, driver = site, site.driver
        first, at = 0, self._address
        sizes: list[int] = []
        while at < self._address + self._nbytes:
            if len(sizes) == MOST_PIECES:
                raise ResourceError(f"the memory is in more than {MOST_PIECES} allocations; register parts of it")
            base, size = driver.mem_range(at)
            first = first or base
            self._handles.append(driver.retain_handle(at))
            if self._control.world_size > 1:
                export(driver, self._handles[-1], self._passing.exported)
            driver.mem_release(self._handles[-1])
            self._handles.pop()
            sizes.append(size)
            at = base + size
        name, uuid, offset = self._passing.bind(), driver.device_uuid(site.ordinal), self._address - first
        return PiecesRecord(self._control.rank, uuid, self._nbytes, offset, tuple(sizes), name).pack()

    def map(self, records: Sequence[bytes], reach: Sequence[bool], deadline: Deadline) -> tuple[int, ...]:
        peers = [parse_pieces(data, rank, self._nbytes) for rank, data in enumerate(records)]
        counts = [len(peer.sizes) for peer in peers]
        if len(set(counts)) > 1:
            raise ResourceError(f"the memory is in different numbers of allocations, by rank {counts}")
        addresses = {self._control.rank: self._address}

        def take(rank: int, held: list[int]) -> None:
            addresses[rank] = self._map_peer(peers[rank], held)

        self._passing.take([peer.socket for peer in peers], self._passing.exported, take, deadline)
        return tuple(addresses[rank] for rank in range(len(peers)))

    def _map_peer(self, peer: PiecesRecord, descriptors: Sequence[int]) -> int:
        site = self.site
        site.refuse_unreachable(peer.rank, peer.uuid)
        driver, total = site.driver, sum(peer.sizes)
        try:
            start = at = driver.address_reserve(total, driver.granularity(site.ordinal))
            self._reserved.append((start, total))
            for fd, size in zip(descriptors, peer.sizes, strict=True):
                self._handles.append(driver.import_descriptor(fd))
                driver.mem_map(at, size, self._handles[-1])
                self._mapped.append((at, size))
                at += size
            driver.mem_allow(start, total, site.ordinal)
        except ResourceError as error:
            raise ResourceError(f"rank {peer.rank}'s memory cannot be mapped: {error}") from error
        return start + peer.offset

    def release(self, undo: Cleanup) -> bool:
        self._passing.abandon()
        if self._site is not None:
            driver = self._site.driver
            gone = all([undo.attempt(driver.mem_unmap, *piece) for piece in self._mapped])
            while self._handles:
                undo.attempt(driver.mem_release, self._handles.pop())
            for reserved in self._reserved if gone else ():
                undo.attempt(driver.address_free, *reserved)
            self._mapped, self._reserved = [], []
        return True
