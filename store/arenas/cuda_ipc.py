"""Memory that the ranks' processes share on GPUs, by legacy CUDA IPC.

    rank 0: cuMemAlloc ── 64-byte handle ──▶ rank 1: cuIpcOpenMemHandle ── writes a word ──▶ rank 0 sees it
            cuMemFree  ◀── "I have unmapped yours" ── rank 1: cuIpcCloseMemHandle

Used if the driver cannot share memory by descriptors (`cuda_vmm`). CUDA forbids freeing a block that a peer has mapped,
so all ranks close together. A handle gives its holder access to the whole allocation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from tricomm.deadline import Deadline, poll
from tricomm.errors import RendezvousError, ResourceError, TricommError
from tricomm.store.arenas.arena import RecordFormat
from tricomm.store.arenas.cuda_arena import Blocks, CudaArena, GpuSite, open_blocks
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import HANDLE_BYTES, UUID_BYTES, Cleanup, Driver

CLOSE_SECONDS = 5.0
GRANULE_BYTES = 2 << 20  # CUDA places smaller allocations together in pieces of this size

_UNMAPPED, _STILL_MAPPED = b"\x01", b"\x00"
_ALIGNMENT_BYTES, _LEAST_ALIGNMENT_BYTES = 256, 16  # of CUDA's blocks; of addresses that kernels read
_MOST_OFFSET = 1 << 47
_FORMAT = RecordFormat(b"TCIP", f"{UUID_BYTES}sQ{HANDLE_BYTES}s")
_log = logging.getLogger(__name__)


class BlockRecord(NamedTuple):
    """The data with which other ranks map a rank's block. Never printed, because the handle gives access to the
    block."""

    rank: int
    uuid: bytes
    nbytes: int
    offset: int
    handle: bytes

    def __repr__(self) -> str:
        return f"BlockRecord(rank={self.rank}, nbytes={self.nbytes})"

    def pack(self) -> bytes:
        return _FORMAT.pack(self.rank, self.nbytes, self.uuid, self.offset, self.handle)


def parse_record(data: bytes, rank: int, nbytes: int, most: int = GRANULE_BYTES) -> BlockRecord:
    """Rank `rank`'s record for a block of `nbytes` bytes, which begins less than `most` bytes into its allocation;
    raises `RendezvousError` for anything else. Pure."""
    uuid, offset, handle = _FORMAT.parse(data, rank, nbytes)
    if offset >= most or offset % (_ALIGNMENT_BYTES if most == GRANULE_BYTES else _LEAST_ALIGNMENT_BYTES):
        raise RendezvousError(f"rank {rank}'s block begins {offset} bytes into its allocation, where CUDA places none")
    return BlockRecord(rank, uuid, nbytes, offset, handle)


def open_cuda_ipc(
    control: ControlPage,
    nbytes: int,
    device: torch.device,
    timeout: float,
    driver: Driver | None = None,
    reach: Sequence[bool] | None = None,
) -> CudaArena:
    """`open_blocks` with legacy CUDA IPC."""
    return open_blocks(control, nbytes, device, timeout, driver, reach, lambda: IpcBlocks(control, nbytes))


class IpcBlocks(Blocks):
    """This rank's cuMemAlloc block, and mappings of the other ranks' blocks. `theirs`: the address of a user's memory
    to share instead of a new block; it is neither written nor freed, and must outlive all mappings."""

    kind = "cuda_ipc"
    no_multicast = "legacy CUDA IPC memory cannot be bound to a multicast address"
    no_suspend = (
        "legacy CUDA IPC cannot map memory again at the same addresses: close the communicator and make a new one, and "
        "capture graphs anew, or make shared memory by descriptors possible (tricomm doctor says what is missing)"
    )

    def __init__(self, control: ControlPage, nbytes: int, theirs: int = 0) -> None:
        self._control, self._nbytes, self._theirs = control, nbytes, theirs
        self._own = 0
        self._mapped: list[int] = []
        self._exported = False

    def allocate(self, site: GpuSite) -> bytes:
        self._site, driver = site, site.driver
        if not self._theirs:
            # CUDA places blocks below 2 MiB in a common piece, and a handle shares the whole piece.
            whole = -(-self._nbytes // GRANULE_BYTES) * GRANULE_BYTES
            self._own = driver.mem_alloc(whole)
            driver.memset(self._own, 0, whole)
            driver.synchronize()
        address = self._theirs or self._own
        base, size = driver.mem_range(address)
        if address + self._nbytes > base + size:
            raise ResourceError(f"{self._nbytes} bytes at {address:#x} leave their allocation of {size} bytes")
        handle = driver.ipc_get_handle(base)
        uuid = driver.device_uuid(site.ordinal)
        return BlockRecord(self._control.rank, uuid, self._nbytes, address - base, handle).pack()

    def shared(self) -> None:
        self._exported = True

    def map(self, records: Sequence[bytes], reach: Sequence[bool], deadline: Deadline) -> tuple[int, ...]:
        most = _MOST_OFFSET if self._theirs else GRANULE_BYTES
        peers = [parse_record(data, rank, self._nbytes, most) for rank, data in enumerate(records)]
        rank, own = self._control.rank, self._theirs or self._own
        return tuple(own if p.rank == rank else self._map_peer(p) if reach[p.rank] else 0 for p in peers)

    def _map_peer(self, peer: BlockRecord) -> int:
        self.site.refuse_unreachable(peer.rank, peer.uuid)
        try:
            address = self.site.driver.ipc_open_handle(peer.handle)
        except ResourceError as error:
            raise ResourceError(f"rank {peer.rank}'s memory cannot be mapped: {error}") from error
        self._mapped.append(address)
        return address + peer.offset

    def keep(self) -> None:
        """Called instead of `release`: tells the peers, so that they also keep their blocks."""
        if self._exported:
            with suppress(TricommError):  # nothing is freed here, whether or not a peer answers
                self._control.exchange(_STILL_MAPPED, "cuda_ipc: close", CLOSE_SECONDS)

    def release(self, undo: Cleanup) -> bool:
        """Unmap the peers' blocks, wait at most `CLOSE_SECONDS` for the peers to unmap this one, and free it."""
        if self._site is None:
            return True
        # A list, so that one failure does not stop the others from being unmapped.
        unmapped = all([undo.attempt(self._site.driver.ipc_close_handle, address) for address in self._mapped])
        may_free = self._may_free(unmapped)
        if self._own and may_free:
            undo.attempt(self._site.driver.mem_free, self._own)
        return may_free

    def _may_free(self, unmapped: bool) -> bool:
        """Tell the peers whether their blocks are unmapped here; returns whether this rank's block may be freed."""
        if not self._exported:
            return True
        deadline = Deadline(CLOSE_SECONDS)
        answer = _UNMAPPED if unmapped else _STILL_MAPPED
        try:
            answers = self._control.exchange(answer, "cuda_ipc: close", CLOSE_SECONDS)
        except Exception as error:  # whatever it is, this rank has to free the block or keep it
            self._outwait_peers(deadline, error)
            return True
        holders = [r for r, data in enumerate(answers) if r != self._control.rank and data != _UNMAPPED]
        if holders:
            _log.warning(
                f"rank {self._control.rank} keeps {self._nbytes} bytes of GPU memory until its process ends: "
                f"rank(s) {holders} have not unmapped them"
            )
        return not holders

    def _outwait_peers(self, deadline: Deadline, error: Exception) -> None:
        def living() -> list[int]:
            return [r for r in range(self._control.world_size) if r != self._control.rank and self._control.alive(r)]

        if not poll(lambda: not living(), deadline.left, 0.01):
            _log.warning(
                f"rank {self._control.rank} frees its shared GPU memory although rank(s) {living()} did not confirm "
                f"within {CLOSE_SECONDS:g} s that they have unmapped it: {error}"
            )
