"""GPU memory that the ranks' processes share: set-up, probe and release, for all kinds.

Set-up has stages. After each stage all ranks continue, or all ranks raise and undo the stages before. CUDA's answer
that a GPU can reach another one is not enough (TensorRT-LLM#17034), so the last stages check that a write arrives. The
probe overwrites the end of each block, so it is left out for the user's own memory.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch

from tricomm import env
from tricomm.deadline import Deadline
from tricomm.errors import GroupAborted, InvalidArgument, ResourceError
from tricomm.store.arenas.arena import Arena, check_nbytes, raw_view
from tricomm.store.collective_stages import CollectiveStages
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import Cleanup, Driver, load_driver

WORD_BYTES = 8


class GpuSite:
    """A rank's GPU: its `ordinal` in this process and its primary context; and the GPUs that this process sees, by
    UUID."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        driver.init()
        self.driver, self.ordinal = driver, ordinal
        self.visible = {driver.device_uuid(n): n for n in range(driver.device_count())}
        self.context = driver.retain_context(ordinal)

    def current(self) -> AbstractContextManager[None]:
        return self.driver.current(self.context)

    def refuse_unreachable(self, rank: int, uuid: bytes) -> None:
        """Raises `ResourceError` if this GPU cannot reach rank `rank`'s."""
        driver, ordinal = self.driver, self.visible.get(uuid)
        # CUDA knows nothing of a GPU that CUDA_VISIBLE_DEVICES hides from this process; mapping its memory decides.
        if ordinal not in (None, self.ordinal) and not driver.can_access_peer(self.ordinal, ordinal):
            raise ResourceError(
                f"cuDeviceCanAccessPeer: GPU {driver.device_bus_id(self.ordinal)} cannot reach GPU "
                f"{driver.device_bus_id(ordinal)} of rank {rank} directly on this machine"
            )


class Blocks(ABC):
    """All ranks' blocks of one kind of memory. `allocate` and `map` run in the GPU's context; called again after
    `give_back`, they use the same addresses. `no_suspend` and `no_multicast`: why this kind cannot be suspended or have
    a multicast address; empty if it can."""

    kind: str
    no_suspend = no_multicast = ""
    _site: GpuSite | None = None  # from `allocate` on

    @property
    def site(self) -> GpuSite:
        assert self._site is not None, "allocate comes first"
        return self._site

    @abstractmethod
    def allocate(self, site: GpuSite) -> bytes:
        """Allocate this rank's block, zeroed. Returns its record for the other ranks."""

    def shared(self) -> None:  # noqa: B027  # nothing to do by default
        """Called before the exchange of records: from now on a peer may map the block."""

    @abstractmethod
    def map(self, records: Sequence[bytes], reach: Sequence[bool], deadline: Deadline) -> tuple[int, ...]:
        """The address of each rank's block; 0 without `reach`. Raises `RendezvousError` for records that do not fit."""

    def multicast(self, probe: int, deadline: Deadline) -> int:
        """Set up the multicast address of all blocks, and test it on the bytes from offset `probe` on; called by all
        ranks together. If that fails, undoes everything and raises the same `ResourceError` on all ranks."""
        raise ResourceError(self.no_multicast)

    def give_back(self, undo: Cleanup) -> None:
        """Release all memory and keep its addresses. May be repeated."""
        raise ResourceError(self.no_suspend)

    def own(self) -> None:  # noqa: B027  # nothing was lent by default
        """Take over the addresses that other blocks have lent. Idempotent."""

    @abstractmethod
    def release(self, undo: Cleanup) -> bool:
        """Release all blocks; False if this rank's block, and therefore its context, must not be released."""

    def keep(self) -> None:  # noqa: B027
        """Called instead of `release`: all blocks stay, because the mappings of every rank keep the memory alive."""


def open_blocks(
    control: ControlPage, nbytes: int, device: torch.device, timeout: float, driver: Driver | None,
    reach: Sequence[bool] | None, make: Callable[[], Blocks], probe: bool = True,
) -> CudaArena:  # fmt: skip
    """A zeroed block of `nbytes` bytes on each rank's GPU, mapped by all ranks; called by all ranks together.

    `reach[r]`: whether this rank maps rank r's block (both ranks pass the same value); by default all blocks are
    mapped. `probe`: write a word to each block and check that it arrives.

    Takes at most about `timeout` seconds. Raises the same error on all ranks, with everything undone: `ResourceError`
    if memory or peer access is refused, forbidden (TRICOMM_P2P_DISABLE, NCCL_P2P_DISABLE) or does not work,
    `InvalidArgument` for a bad size or device, `RendezvousError` if the ranks' records do not fit together.
    """
    deadline = Deadline(timeout)
    arena = CudaArena(control, nbytes, device, make(), reach)
    stage = CollectiveStages(control, arena.kind, deadline)
    with ExitStack() as undo:
        undo.callback(arena._release)
        stage("reach the GPU", lambda: arena._attach(driver, WORD_BYTES * control.world_size if probe else 1))
        arena._share(stage, deadline, probe)
        undo.pop_all()
    return arena


class CudaArena(Arena):
    """One block per rank, each mapped in this process."""

    def __init__(
        self, control: ControlPage, nbytes: int, device: torch.device, blocks: Blocks, reach: Sequence[bool] | None
    ) -> None:
        self.kind, self.no_suspend = blocks.kind, blocks.no_suspend
        self.rank, self.nbytes, self.device = control.rank, nbytes, device
        self.bases: tuple[int, ...] = ()
        self.control_address = 0
        self.no_multicast = "it was not asked for"
        self._control, self._blocks = control, blocks
        self._reach = tuple(reach) if reach is not None else (True,) * control.world_size
        self._at: GpuSite | None = None
        self._lock = threading.Lock()

    def _view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not self.bases[rank]:
            raise InvalidArgument(f"rank {rank}'s memory is out of rank {self.rank}'s reach: their GPUs have no link")
        return raw_view(self.bases[rank] + offset, shape, dtype, self.device)

    @property
    def blocks(self) -> Blocks:
        return self._blocks

    def own(self) -> None:
        self._blocks.own()

    def suspend(self) -> None:
        site = self._site
        self.suspended = True
        with site.current():
            site.driver.synchronize()
        undo = Cleanup(site.driver, site.context)
        self._blocks.give_back(undo)
        if undo.failures:
            raise undo.failures[0]

    def resume(self, control: ControlPage, timeout: float) -> None:
        deadline = Deadline(timeout)
        with ExitStack() as undo:
            undo.callback(self._blocks.give_back, Cleanup(self._site.driver, self._site.context))
            self._share(CollectiveStages(control, f"{self.kind}: resume", deadline), deadline)
            undo.pop_all()
        self.suspended = False

    def _share(self, stage: CollectiveStages, deadline: Deadline, probe: bool = True) -> None:
        mine = stage("allocate memory", self._allocate)
        self._blocks.shared()  # even if the exchange fails on this rank
        records = self._control.exchange(mine, f"{self.kind}: memory records", deadline.left)
        stage("map peers' memory", lambda: self._map(records, self._reach, deadline))
        if not probe:
            return
        stage("write to peers", self._write_probe)
        stage("see peers' writes", self._read_probe)
        stage("clear", self._clear_probe)
        if self.multicast and self._multicast(deadline) != self.multicast:
            raise ResourceError("the multicast address is another one than before")

    def look_for_switch(self, deadline: Deadline) -> None:
        """Set `multicast`, or `no_multicast` if that fails; called by all ranks together.

        Raises if a rank has ended, and `GroupAborted` on all ranks if the probe has cost a rank its CUDA context.
        """
        try:
            if self._control.world_size == 1 or not all(self._reach):
                raise ResourceError("not every rank reaches the memory of another one")
            self.multicast, self.no_multicast = self._multicast(deadline), ""
        except ResourceError as error:  # the same on all ranks
            self.no_multicast = str(error)
            CollectiveStages(self._control, self.kind, deadline)("go on without a switch", self._check_context)

    def _check_context(self) -> None:
        """Raises `GroupAborted` if an earlier kernel has cost this process its CUDA context."""
        site = self._site
        try:
            with site.current():
                site.driver.synchronize()
        except ResourceError as error:
            raise GroupAborted(
                f"{error}; the probe of the multicast address has caused this ({self.no_multicast}): restart the "
                "processes with TRICOMM_MULTICAST=0"
            ) from error

    def _multicast(self, deadline: Deadline) -> int:
        probe = self.nbytes - WORD_BYTES * self._control.world_size
        return self._blocks.multicast(probe, deadline)

    def close(self) -> None:
        """Release all blocks, as their kind requires. Idempotent.

        All ranks call it, after their kernels have been told to leave. Tries every step, then raises the driver's first
        `ResourceError`."""
        failures = self._release()
        if failures:
            raise failures[0]

    def keep(self) -> None:
        """Called instead of `close`: all blocks stay mapped here."""
        if self._begin_end() is not None:
            self._blocks.keep()

    def _attach(self, driver: Driver | None, least: int) -> None:
        variable = env.peer_access_disabled()
        if variable is not None:
            raise ResourceError(f"{variable} is set, which forbids GPU peer access; unset it, or use NCCL")
        self._check_arguments(least)
        self._at = GpuSite(driver or load_driver(), int(self.device.index))
        # This arena does not unregister the page: several arenas share it, and it lives as long as the group's host
        # memory.
        self.control_address = self._control.host_words.on_device(self._at.driver, self._at.ordinal)

    def _check_arguments(self, least: int) -> None:
        check_nbytes(self.nbytes, least)
        if self.device.type != "cuda":
            raise InvalidArgument(f"{self.kind} shares GPU memory, not memory of {self.device}")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def _site(self) -> GpuSite:
        assert self._at is not None, "_attach comes first"
        return self._at

    def _allocate(self) -> bytes:
        with self._site.current():
            return self._blocks.allocate(self._site)

    def _map(self, records: Sequence[bytes], reach: Sequence[bool], deadline: Deadline) -> None:
        with self._site.current():
            bases = self._blocks.map(records, reach, deadline)
        if self.bases and bases != self.bases:
            raise ResourceError(f"{self.kind}: memory came back at other addresses than before")
        self.bases = bases

    def _probe_address(self, target: int, writer: int) -> int:
        return self.bases[target] + self.nbytes - WORD_BYTES * (self._control.world_size - writer)

    def _write_probe(self) -> None:
        driver = self._site.driver
        with self._site.current():
            for target, base in enumerate(self.bases):
                if base:
                    driver.write(self._probe_address(target, self.rank), _probe_word(self.rank, target))
            driver.synchronize()

    def _read_probe(self) -> None:
        world_size = self._control.world_size
        with self._site.current():
            data = self._site.driver.read(self._probe_address(self.rank, 0), WORD_BYTES * world_size)
        words = [data[r * WORD_BYTES : (r + 1) * WORD_BYTES] for r in range(world_size)]
        near = [r for r, base in enumerate(self.bases) if base]
        missing = [r for r in near if words[r] != _probe_word(r, self.rank)]
        if missing:
            raise ResourceError(
                f"CUDA maps rank {self.rank}'s GPU memory for rank(s) {missing}, but their writes did not arrive; "
                "look at IOMMU and PCIe ACS settings, or set TRICOMM_P2P_DISABLE=1 to do without peer access"
            )

    def _clear_probe(self) -> None:
        driver = self._site.driver
        with self._site.current():
            driver.memset(self._probe_address(self.rank, 0), 0, WORD_BYTES * self._control.world_size)
            driver.synchronize()

    def _begin_end(self) -> GpuSite | None:
        """This rank's GPU for the first caller that ends the arena, None for later ones."""
        with self._lock:
            before, self.closed = self.closed, True
        return None if before else self._at

    def _release(self) -> list[ResourceError]:
        site = self._begin_end()
        if site is None:
            return []
        undo = Cleanup(site.driver, site.context)
        undo.attempt(site.driver.synchronize)
        if self._blocks.release(undo):  # the last release of a context frees all memory in it
            undo.release_context(site.ordinal)
        return undo.failures


def _probe_word(writer: int, target: int) -> bytes:
    return struct.pack("<4sHH", b"TCPW", writer, target)
