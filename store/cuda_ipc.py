"""Memory that the ranks' processes share on GPUs, by CUDA IPC.

    rank 0: cuMemAlloc ── 64-byte handle ──▶ rank 1: cuIpcOpenMemHandle ── writes a word ──▶ rank 0 sees it
            cuMemFree  ◀── "I have unmapped yours" ── rank 1: cuIpcCloseMemHandle

Set-up goes in stages. After each stage all ranks go on, or all ranks raise and undo the stages before. CUDA's answer
that a GPU can reach another one is not enough (TensorRT-LLM#17034), so the last stage is a write that must arrive.
A handle gives its holder the whole allocation: the block is the library's own, and holds nothing of the user's.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass

import torch

from tricomm import env
from tricomm.deadline import Deadline, poll
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError, TricommError
from tricomm.store.collective_stages import CollectiveStages
from tricomm.store.control import ControlPage
from tricomm.store.cuda_driver import HANDLE_BYTES, UUID_BYTES, Cleanup, Driver, load_driver
from tricomm.store.local_arena import check_view, raw_view

CLOSE_SECONDS = 5.0
WORD_BYTES = 8
GRANULE_BYTES = 2 << 20  # CUDA cuts smaller allocations from shared pieces of this size

_UNMAPPED, _STILL_MAPPED = b"\x01", b"\x00"
_MAX_NBYTES = 1 << 46
_ALIGNMENT_BYTES = 256
_MAGIC = b"TCIP"
_VERSION = 1
_RECORD = struct.Struct(f"<4sHH{UUID_BYTES}sQQ{HANDLE_BYTES}s")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockRecord:
    """A rank's block of GPU memory, as the other ranks are told of it. Never printed: the handle is a key to it."""

    rank: int
    uuid: bytes
    nbytes: int
    offset: int
    handle: bytes

    def pack(self) -> bytes:
        return _RECORD.pack(_MAGIC, _VERSION, self.rank, self.uuid, self.nbytes, self.offset, self.handle)

    def __repr__(self) -> str:
        return f"BlockRecord(rank={self.rank}, nbytes={self.nbytes})"


def parse_record(data: bytes, rank: int, nbytes: int) -> BlockRecord:
    """Rank `rank`'s record for a block of `nbytes` bytes; raises `RendezvousError` for anything else. Pure."""
    if len(data) != _RECORD.size:
        raise RendezvousError(f"rank {rank}'s memory record has {len(data)} bytes, expected {_RECORD.size}")
    magic, version, sender, uuid, size, offset, handle = _RECORD.unpack(data)
    if magic != _MAGIC or version != _VERSION:
        raise RendezvousError(f"rank {rank}'s memory record is not of version {_VERSION}: mixed tricomm versions?")
    if sender != rank:
        raise RendezvousError(f"rank {rank}'s memory record says that it is rank {sender}'s")
    if size != nbytes:
        raise RendezvousError(f"rank {rank} shares {size} bytes, this rank shares {nbytes}: use the same size")
    if offset >= GRANULE_BYTES or offset % _ALIGNMENT_BYTES:
        raise RendezvousError(f"rank {rank}'s block lies {offset} bytes into its allocation: not a place CUDA gives")
    return BlockRecord(rank, uuid, nbytes, offset, handle)


def open_cuda_ipc(
    control: ControlPage, nbytes: int, device: torch.device, timeout: float, driver: Driver | None = None,
    reach: Sequence[bool] | None = None,
) -> CudaIpcArena:  # fmt: skip
    """A block of `nbytes` bytes, zeroed, on each rank's GPU, mapped by all ranks; called by all ranks together.

    `reach` says for each rank if this rank maps its block, alike at both ends; by default all blocks are mapped.

    Takes at most about `timeout` seconds. Raises the same error on all ranks, with everything undone: `ResourceError`
    if memory or peer access is refused, forbidden (TRICOMM_P2P_DISABLE, NCCL_P2P_DISABLE) or does not work,
    `InvalidArgument` for a bad size or device, `RendezvousError` if the ranks' records do not fit together.
    """
    deadline = Deadline(timeout)
    stage = CollectiveStages(control, "cuda_ipc", deadline)

    with ExitStack() as undo:
        arena = CudaIpcArena(control, nbytes, device, reach)
        undo.callback(arena._release)
        stage("reach the GPU", lambda: arena._attach(driver))
        mine = stage("allocate memory", arena._allocate)
        records = arena._exchange(mine, deadline.left)
        peers = stage("check the records", lambda: [parse_record(data, r, nbytes) for r, data in enumerate(records)])
        stage("map peers' memory", lambda: arena._map(peers))
        stage("write to peers", arena._write_probe)
        stage("see peers' writes", arena._read_probe)
        stage("clear", arena._clear_probe)
        undo.pop_all()
    return arena


class CudaIpcArena:
    """One block per rank, each mapped in this process. `bases[r]` is the address of rank r's block here, 0 if it is
    out of reach."""

    kind = "cuda_ipc"

    def __init__(
        self, control: ControlPage, nbytes: int, device: torch.device, reach: Sequence[bool] | None = None
    ) -> None:
        self._reach = tuple(reach) if reach is not None else (True,) * control.world_size
        self.rank, self.nbytes, self.device = control.rank, nbytes, device
        self.bases: tuple[int, ...] = ()
        self.control_address = 0
        self._control = control
        self._driver: Driver | None = None
        self._context: int | None = None
        self._own = 0
        self._mapped: list[int] = []
        self._visible: dict[bytes, int] = {}
        self._exported = False
        self._closed = False
        self._lock = threading.Lock()

    def tensor(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Rank `rank`'s bytes from `offset` on, as a tensor that is valid until `close`.

        Raises `InvalidArgument` if it would leave the block, `GroupAborted` after `close`."""
        if self._closed:
            raise GroupAborted("this cuda_ipc arena is closed; its memory is gone")
        check_view(self.nbytes, self.bases, rank, offset, shape, dtype.itemsize)
        if not self.bases[rank]:
            raise InvalidArgument(f"rank {rank}'s memory is out of rank {self.rank}'s reach: their GPUs have no link")
        return raw_view(self.bases[rank] + offset, shape, dtype, self.device)

    def close(self) -> None:
        """Unmap the peers' blocks, wait until the peers have unmapped this one, free it. Idempotent.

        All ranks call it; waits at most `CLOSE_SECONDS` for those that don't. Kernels must have been told to leave.
        Raises the first `ResourceError` of the driver, after everything has been tried."""
        failures = self._release()
        if failures:
            raise failures[0]

    def keep(self) -> None:
        """In place of `close`: tell the peers that their blocks stay mapped here, so that they keep them, too."""
        self._release(unmap=False)

    def _attach(self, driver: Driver | None) -> None:
        for variable in ("TRICOMM_P2P_DISABLE", "NCCL_P2P_DISABLE"):
            if env.flag(variable):
                raise ResourceError(f"{variable} is set, so GPU peer access is not to be used; unset it, or use NCCL")
        self._check_arguments()
        driver = driver or load_driver()
        driver.init()
        self._visible = {driver.device_uuid(ordinal): ordinal for ordinal in range(driver.device_count())}
        self._context = driver.retain_context(self._ordinal)
        self._driver = driver
        # Not this arena's to give back: several share the page, and it lives as long as the group's memory on the host.
        self.control_address = self._control.host_words.on_device(driver, self._ordinal)

    def _check_arguments(self) -> None:
        least = WORD_BYTES * self._control.world_size
        if not least <= self.nbytes <= _MAX_NBYTES:
            raise InvalidArgument(f"an arena of {self.nbytes} bytes; allowed are {least} to {_MAX_NBYTES}")
        if self.device.type != "cuda":
            raise InvalidArgument(f"cuda_ipc shares GPU memory, not memory of {self.device}")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def _ordinal(self) -> int:
        return int(self.device.index)

    @property
    def _cuda(self) -> Driver:
        assert self._driver is not None, "_attach comes first"
        return self._driver

    def _allocate(self) -> bytes:
        driver = self._cuda
        with self._driver_current():
            # Below 2 MiB CUDA cuts blocks from a shared piece, and a handle shares the whole piece.
            whole = -(-self.nbytes // GRANULE_BYTES) * GRANULE_BYTES
            self._own = driver.mem_alloc(whole)
            driver.memset(self._own, 0, whole)
            driver.synchronize()
            base = driver.mem_base(self._own)
            handle = driver.ipc_get_handle(base)
        uuid = driver.device_uuid(self._ordinal)
        return BlockRecord(self.rank, uuid, self.nbytes, self._own - base, handle).pack()

    def _exchange(self, mine: bytes, timeout: float) -> list[bytes]:
        # From here on a peer may map the block, even if the exchange fails on this rank.
        self._exported = True
        return self._control.exchange(mine, "cuda_ipc: memory records", timeout)

    def _map(self, peers: list[BlockRecord]) -> None:
        bases = []
        with self._driver_current():
            for peer in peers:
                near = self._reach[peer.rank]
                bases.append(self._own if peer.rank == self.rank else self._map_peer(peer) if near else 0)
        self.bases = tuple(bases)

    def _map_peer(self, peer: BlockRecord) -> int:
        driver, ordinal = self._cuda, self._visible.get(peer.uuid)
        # A GPU that CUDA_VISIBLE_DEVICES hides from this process cannot be asked about: opening decides.
        if ordinal not in (None, self._ordinal) and not driver.can_access_peer(self._ordinal, ordinal):
            raise ResourceError(
                f"cuDeviceCanAccessPeer: GPU {driver.device_bus_id(self._ordinal)} cannot reach GPU "
                f"{driver.device_bus_id(ordinal)} of rank {peer.rank} directly on this machine"
            )
        try:
            address = driver.ipc_open_handle(peer.handle)
        except ResourceError as error:
            raise ResourceError(f"rank {peer.rank}'s memory cannot be mapped: {error}") from error
        self._mapped.append(address)
        return address + peer.offset

    def _probe_offset(self, writer: int) -> int:
        return self.nbytes - WORD_BYTES * (self._control.world_size - writer)

    def _write_probe(self) -> None:
        with self._driver_current():
            for target, base in enumerate(self.bases):
                if not base:
                    continue
                self._cuda.write(base + self._probe_offset(self.rank), _probe_word(self.rank, target))
            self._cuda.synchronize()

    def _read_probe(self) -> None:
        world_size = self._control.world_size
        with self._driver_current():
            data = self._cuda.read(self._own + self._probe_offset(0), WORD_BYTES * world_size)
        words = [data[r * WORD_BYTES : (r + 1) * WORD_BYTES] for r in range(world_size)]
        near = [r for r, base in enumerate(self.bases) if base]
        missing = [r for r in near if words[r] != _probe_word(r, self.rank)]
        if missing:
            raise ResourceError(
                f"CUDA maps rank {self.rank}'s GPU memory for rank(s) {missing}, but their writes did not arrive; "
                "look at IOMMU and PCIe ACS settings, or set TRICOMM_P2P_DISABLE=1 to do without peer access"
            )

    def _clear_probe(self) -> None:
        with self._driver_current():
            self._cuda.memset(self._own + self._probe_offset(0), 0, WORD_BYTES * self._control.world_size)
            self._cuda.synchronize()

    def _driver_current(self) -> AbstractContextManager[None]:
        assert self._context is not None, "_attach comes first"
        return self._cuda.current(self._context)

    def _release(self, unmap: bool = True) -> list[ResourceError]:
        with self._lock:
            if self._closed:
                return []
            self._closed = True
        if self._driver is None or self._context is None:
            return []
        if not unmap:
            if self._exported:
                with suppress(TricommError):  # nothing is freed here, whether or not a peer answers
                    self._control.exchange(_STILL_MAPPED, "cuda_ipc: close", CLOSE_SECONDS)
            return []
        undo = Cleanup(self._driver, self._context)
        undo.attempt(self._driver.synchronize)
        # A list, so that one failure does not stop the others from being unmapped.
        unmapped = all([undo.attempt(self._driver.ipc_close_handle, address) for address in self._mapped])
        may_free = self._may_free(unmapped)
        if self._own and may_free:
            undo.attempt(self._driver.mem_free, self._own)
        if may_free:  # the last release of a context takes all memory in it along
            undo.release_context(self._ordinal)
        return undo.failures

    def _may_free(self, unmapped: bool) -> bool:
        """Tell the peers if their blocks are unmapped here; returns whether they have unmapped this rank's block."""
        if not self._exported:
            return True
        deadline = Deadline(CLOSE_SECONDS)
        answer = _UNMAPPED if unmapped else _STILL_MAPPED
        try:
            answers = self._control.exchange(answer, "cuda_ipc: close", CLOSE_SECONDS)
        except Exception as error:  # of any kind: this rank still has to free the block or keep it
            self._outwait_peers(deadline, error)
            return True
        holders = [r for r, data in enumerate(answers) if r != self.rank and data != _UNMAPPED]
        if holders:
            _log.warning(
                f"rank {self.rank} keeps {self.nbytes} bytes of GPU memory until its process ends: "
                f"rank(s) {holders} have not unmapped them"
            )
        return not holders

    def _outwait_peers(self, deadline: Deadline, error: Exception) -> None:
        def living() -> list[int]:
            return [r for r in range(self._control.world_size) if r != self.rank and self._control.alive(r)]

        if not poll(lambda: not living(), deadline.left, 0.01):
            _log.warning(
                f"rank {self.rank} frees its shared GPU memory although rank(s) {living()} did not confirm within "
                f"{CLOSE_SECONDS:g} s that they have unmapped it: {error}"
            )


def _probe_word(writer: int, target: int) -> bytes:
    return struct.pack("<4sHH", b"TCPW", writer, target)
