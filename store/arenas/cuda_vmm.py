"""Memory that the ranks' processes share on GPUs, by CUDA's virtual memory management.

    rank 0: cuMemCreate, cuMemMap ── handle, see passing.py ──▶ rank 1: import, cuMemMap ── writes a word ──▶

Needs no common PID or IPC namespace. Ranks close independently: memory lives until its last mapping, handle and
descriptor are gone. Suspended memory is allocated and mapped again in the same way, at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tricomm.deadline import Deadline
from tricomm.errors import RendezvousError, ResourceError
from tricomm.store.arenas.arena import RecordFormat
from tricomm.store.arenas.cuda_arena import Blocks, CudaArena, GpuSite, open_blocks
from tricomm.store.arenas.cuda_multicast import Multicast
from tricomm.store.arenas.passing import TOKEN_BYTES, passing
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import DESCRIPTOR, UUID_BYTES, Cleanup, Driver
from tricomm.store.cuda.mapped_memory import MappedMemory

_FORMAT = RecordFormat(b"TCVM", f"{UUID_BYTES}sQ{TOKEN_BYTES}s")
_MOST = 1 << 47


def open_cuda_vmm(
    control: ControlPage,
    nbytes: int,
    device: torch.device,
    timeout: float,
    driver: Driver | None = None,
    reach: Sequence[bool] | None = None,
    sharing: str = DESCRIPTOR,
    lender: CudaArena | None = None,
) -> CudaArena:
    """`open_blocks` with memory shared by `sharing` handles, at the addresses of `lender`. Also raises `ResourceError`
    if a GPU cannot do that."""
    lent = lender.blocks if lender is not None else None
    if lent is not None and not isinstance(lent, VmmBlocks):
        raise ResourceError(f"the addresses of {lent.kind} memory cannot be used again")

    def make() -> VmmBlocks:
        return VmmBlocks(control, nbytes, sharing, lent)

    return open_blocks(control, nbytes, device, timeout, driver, reach, make)


@dataclass(frozen=True)
class VmmRecord:
    """The data with which other ranks map a rank's block: its size `whole`, the `uuid` of its GPU, and the token by
    which its handle is passed (`passing.py`)."""

    rank: int
    uuid: bytes
    nbytes: int
    whole: int
    token: bytes

    def pack(self) -> bytes:
        return _FORMAT.pack(self.rank, self.nbytes, self.uuid, self.whole, self.token)


def parse_record(data: bytes, rank: int, nbytes: int) -> VmmRecord:
    """Rank `rank`'s record for a block of `nbytes` bytes; raises `RendezvousError` for anything else. Pure."""
    uuid, whole, token = _FORMAT.parse(data, rank, nbytes)
    if not nbytes <= whole <= _MOST:
        raise RendezvousError(f"rank {rank} shares {whole} bytes for a block of {nbytes}: not what CUDA gives")
    return VmmRecord(rank, uuid, nbytes, whole, token)


class VmmBlocks(Blocks):
    """This rank's memory and the other ranks', mapped here."""

    kind = "cuda_vmm"

    def __init__(self, control: ControlPage, nbytes: int, sharing: str, lender: VmmBlocks | None = None) -> None:
        self._control, self._nbytes, self._sharing = control, nbytes, sharing
        self._granularity = 0
        self._lender = lender
        self._mapped: dict[int, MappedMemory] = dict(lender._mapped) if lender else {}  # by rank, this rank's first
        self._passing = passing(sharing, control, self.kind)
        self._switch: Multicast | None = None

    def allocate(self, site: GpuSite) -> bytes:
        self._site, driver = site, site.driver
        refusal = driver.vmm_refusal(site.ordinal, self._sharing)
        if refusal is not None:
            raise ResourceError(refusal)
        self._granularity = driver.granularity(site.ordinal, self._sharing)
        whole = -(-self._nbytes // self._granularity) * self._granularity
        own = self._mapping(self._control.rank, whole)
        own.make(site.ordinal, self._granularity, self._sharing)
        driver.synchronize()
        token = self._passing.offer(driver, own.handles[0]) if self._control.world_size > 1 else b""
        return VmmRecord(self._control.rank, driver.device_uuid(site.ordinal), self._nbytes, whole, token).pack()

    def map(self, records: Sequence[bytes], reach: Sequence[bool], deadline: Deadline) -> tuple[int, ...]:
        peers = [parse_record(data, rank, self._nbytes) for rank, data in enumerate(records)]
        addresses = {self._control.rank: self._mapped[self._control.rank].address}

        def load(rank: int, fetch: Callable[[], int]) -> None:
            addresses[rank] = self._map_peer(peers[rank], fetch) if reach[rank] else 0

        self._passing.take(self.site.driver, [peer.token for peer in peers], load, deadline)
        return tuple(addresses[rank] for rank in range(len(peers)))

    def multicast(self, probe: int, deadline: Deadline) -> int:
        site = self.site
        if self._switch is None:
            lent = self._lender._switch if self._lender else None
            self._switch = Multicast(self._control, site, self._mapped[self._control.rank], self._sharing, lent)
        try:
            return self._switch.share(probe, deadline)
        except BaseException:
            undo = Cleanup(site.driver, site.context)
            undo.attempt(site.driver.synchronize)
            self._switch.give_back(undo)
            raise

    def _map_peer(self, peer: VmmRecord, fetch: Callable[[], int]) -> int:
        self.site.refuse_unreachable(peer.rank, peer.uuid)
        block = self._mapping(peer.rank, peer.whole)
        try:
            block.handles.append(fetch())
            block.put(self.site.ordinal, self._granularity)
        except ResourceError as error:
            raise ResourceError(f"rank {peer.rank}'s memory cannot be mapped: {error}") from error
        return block.address

    def _mapping(self, rank: int, nbytes: int) -> MappedMemory:
        """Addresses for rank `rank`'s memory: the addresses that it had before, if any."""
        site = self.site
        block = self._mapped.setdefault(rank, MappedMemory(site.driver, nbytes))
        if block.nbytes != nbytes:
            raise RendezvousError(f"rank {rank} shares {nbytes} bytes, and shared {block.nbytes} before")
        block.require_empty(Cleanup(site.driver, site.context))
        return block

    def give_back(self, undo: Cleanup) -> None:
        if self._switch is not None:
            self._switch.give_back(undo)
        self._passing.abandon()
        for block in self._mapped.values():
            block.empty(undo)

    def own(self) -> None:
        if (lender := self._lender) is not None:
            self._switch = self._switch or lender._switch
            self._lender = lender._switch = None
            lender._mapped.clear()

    def release(self, undo: Cleanup) -> bool:
        if self._lender is not None:
            self.give_back(undo)
            for rank in self._lender._mapped:
                self._mapped.pop(rank, None)
            if self._lender._switch is not None:
                self._switch = None
        if self._switch is not None:
            self._switch.release(undo)
        self._passing.abandon()
        while self._mapped:
            self._mapped.popitem()[1].release(undo)
        return True
