"""Memory of ranks that live in one process: on the CPU (simulation, tests), or on one GPU with a stream per rank.

Every rank's block is the process's own memory, so `bases` are plain addresses and nothing has to be exchanged. The
blocks live as long as any rank uses them: the last `close` frees them all.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from tricomm.deadline import Deadline
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.store.arenas.arena import Arena, check_nbytes, host_view, raw_view
from tricomm.store.collective_stages import CollectiveStages
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import Cleanup, Driver, load_driver
from tricomm.store.cuda.mapped_memory import MappedMemory
from tricomm.store.host_words import HostWords


def host_page_address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class LocalGroup:
    """The ranks of one process on `device`, a CPU or one GPU.

    `pages` are the ranks' control pages (`ControlPage.host_words`), which this group does not own: each rank
    unregisters its page when it closes. Raises `InvalidArgument` for a bad world size or device.
    """

    def __init__(
        self, world_size: int, device: torch.device, pages: Sequence[HostWords], driver: Driver | None = None
    ) -> None:
        if world_size < 1:
            raise InvalidArgument(f"world size {world_size} is not positive")
        if device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"a local group lives on the CPU or on a GPU, not on {device}")
        self.world_size, self.device, self._pages, self._driver = world_size, device, pages, driver

    def open(self, nbytes: int) -> list[LocalArena]:
        """One arena per rank: blocks of `nbytes` zeroed bytes. May be called again for more memory.

        Raises `InvalidArgument` for a bad size, `ResourceError` if memory is refused; then nothing is left.
        """
        check_nbytes(nbytes)
        if self.device.type == "cpu":
            blocks: _Blocks = _HostBlocks(nbytes, self._pages)
        else:
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            blocks = _GpuBlocks(nbytes, torch.device("cuda", index), self._driver or load_driver(), self._pages)
        return [LocalArena(rank, nbytes, blocks) for rank in range(self.world_size)]


class LocalArena(Arena):
    """One rank's end of the shared blocks. `bases[r]` is the address of rank r's block, the same in all arenas."""

    kind = "local"

    def __init__(self, rank: int, nbytes: int, blocks: _Blocks) -> None:
        self.rank, self.nbytes, self.device = rank, nbytes, blocks.device
        self.no_multicast = "" if blocks.device.type == "cpu" else "all ranks are on one GPU"
        self.bases = blocks.bases
        self.no_suspend = blocks.no_suspend
        self.control_address = blocks.control_addresses[rank]
        self._blocks: _Blocks | None = blocks

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream on which this rank's kernels run; None on the CPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._blocks is not None, "it is not closed"
        return self._blocks.view(rank, offset, shape, dtype)

    def suspend(self) -> None:
        self.suspended = True
        if self._blocks is not None:
            self._blocks.give_back(self.rank)

    def resume(self, control: ControlPage, timeout: float) -> None:
        blocks = self._blocks
        assert blocks is not None, "it is not closed"
        with ExitStack() as undo:
            undo.callback(blocks.give_back, self.rank)
            CollectiveStages(control, "local: resume", Deadline(timeout))(
                "allocate memory", lambda: blocks.take_again(self.rank)
            )
            undo.pop_all()
        self.suspended = False

    def close(self) -> None:
        """Idempotent; the last rank's close frees all blocks. Raises the driver's first `ResourceError`."""
        self.closed = True
        blocks, self._blocks = self._blocks, None
        if blocks is not None:
            blocks.leave()


class _Blocks(ABC):
    """All ranks' blocks and control pages, freed when every rank has left."""

    device: torch.device
    bases: tuple[int, ...]
    control_addresses: tuple[int, ...]
    no_suspend = ""

    def __init__(self, pages: Sequence[HostWords]) -> None:
        self._users = len(pages)
        self._lock = threading.Lock()

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self.free()

    @abstractmethod
    def free(self) -> None: ...

    @abstractmethod
    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    @abstractmethod
    def give_back(self, rank: int) -> None:
        """Release a rank's memory and keep its addresses; may be repeated."""

    @abstractmethod
    def take_again(self, rank: int) -> None:
        """Allocate zeroed memory at the addresses of a rank."""


class _HostBlocks(_Blocks):
    device = torch.device("cpu")

    def __init__(self, nbytes: int, pages: Sequence[HostWords]) -> None:
        super().__init__(pages)
        self._blocks = [_zeroed(nbytes) for _ in pages]
        self.bases = tuple(map(host_page_address, self._blocks))
        self.control_addresses = tuple(page.address for page in pages)

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return host_view(self._blocks[rank], offset, shape, dtype)

    def give_back(self, rank: int) -> None:
        self._blocks[rank].madvise(mmap.MADV_DONTNEED)

    take_again = give_back  # drops data that was written meanwhile; pages are allocated when touched, as at first

    def free(self) -> None:
        # Tensors may still view a block; it is unmapped with the last of them.
        self._blocks.clear()


class _GpuBlocks(_Blocks):
    def __init__(self, nbytes: int, device: torch.device, driver: Driver, pages: Sequence[HostWords]) -> None:
        super().__init__(pages)
        self.device, self._driver = device, driver
        self._mapped: list[MappedMemory] = []
        with ExitStack() as undo:
            driver.init()
            self._context = driver.retain_context(device.index)
            undo.callback(driver.release_context, device.index)
            self.control_addresses = tuple(page.on_device(driver, device.index) for page in pages)
            self.no_suspend = driver.vmm_refusal(device.index) or ""
            with driver.current(self._context):
                self._granularity = 0 if self.no_suspend else driver.granularity(device.index)
                self.bases = tuple(self._allocate(undo, nbytes) for _ in pages)
                driver.synchronize()
            self._undo = undo.pop_all()

    def _allocate(self, undo: ExitStack, nbytes: int) -> int:
        if not self.no_suspend:
            whole = -(-nbytes // self._granularity) * self._granularity
            block = MappedMemory(self._driver, whole)
            undo.callback(self._release, block)
            self._mapped.append(block)
            block.make(self.device.index, self._granularity)
            return block.address
        base = self._driver.mem_alloc(nbytes)
        undo.callback(self._in_context, self._driver.mem_free, base)
        self._driver.memset(base, 0, nbytes)
        return base

    def _in_context(self, call: Callable[[int], None], address: int) -> None:
        with self._driver.current(self._context):
            call(address)

    def _release(self, block: MappedMemory) -> None:
        undo = Cleanup(self._driver, self._context)
        block.release(undo)
        if undo.failures:
            raise undo.failures[0]

    def give_back(self, rank: int) -> None:
        with self._driver.current(self._context):
            self._driver.synchronize()
        undo = Cleanup(self._driver, self._context)
        self._mapped[rank].empty(undo)
        if undo.failures:
            raise undo.failures[0]

    def take_again(self, rank: int) -> None:
        block = self._mapped[rank]
        block.require_empty(Cleanup(self._driver, self._context))
        with self._driver.current(self._context):
            block.make(self.device.index, self._granularity)
            self._driver.synchronize()

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return raw_view(self.bases[rank] + offset, shape, dtype, self.device)

    def free(self) -> None:
        with self._undo:
            with self._driver.current(self._context):
                self._driver.synchronize()


def _zeroed(nbytes: int) -> mmap.mmap:
    """Page-aligned zeroed host memory; `ResourceError` if the system refuses it."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ResourceError(f"{nbytes} bytes of host memory refused: {error.strerror}; use a smaller arena") from error


def host_bytes(address: int, nbytes: int) -> NDArray[np.uint8]:
    """The process's own memory at `address` as bytes; the caller keeps the memory alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
