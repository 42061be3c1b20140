"""Memory that every rank of a group can reach: the interface of all kinds, and their common functions."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError
from tricomm.store.control import ControlPage

MAX_NBYTES = 1 << 46
_VERSION = 2  # of the records
NOT_BOUND = "registered memory is not bound to a multicast address (torch's symmetric memory with group= may be)"


class Arena(ABC):
    """One block of `nbytes` bytes for each rank.

    kind          "posix_shm", "cuda_vmm", "cuda_ipc", "local", "torch", or "none"
    bases         the address of each rank's block as mapped here; 0 if it is out of reach
    reason        why the memory is not of the default kind; empty if it is
    multicast     the multicast address of all ranks' blocks, for NVLS; 0 if there is none
    no_multicast  why there is none; empty on a CPU, whose interpreter needs none
    no_suspend    why the memory cannot be suspended; empty if it can
    suspended     from `suspend` until a `resume` that succeeds on all ranks
    """

    kind: str
    nbytes: int
    bases: tuple[int, ...]
    reason = no_multicast = no_suspend = ""
    multicast = 0
    suspended = closed = False

    def tensor(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """View of rank `rank`'s block from byte `offset` on.

        Raises `InvalidArgument` if the view would leave the block or the block is out of reach, `GroupAborted` after
        `close`."""
        if self.closed:
            raise GroupAborted(f"this {self.kind} arena is closed; its memory is gone")
        check_view(self.nbytes, self.bases, rank, offset, shape, dtype.itemsize)
        return self._view(rank, offset, shape, dtype)

    @abstractmethod
    def _view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `tensor`, with arguments that have been checked."""

    def suspend(self) -> None:  # noqa: B027  # nothing to release by default
        """Release this rank's share of the memory and keep all addresses; does not wait for other ranks.

        No kernel of any rank may be using it. Raises `ResourceError` if a step is refused; the next `suspend`, `resume`
        or `close` tries it again."""

    def resume(self, control: ControlPage, timeout: float) -> None:  # noqa: B027
        """Allocate zeroed memory at the same addresses; called by all ranks together, each after `suspend`.

        If it fails, all ranks release everything and raise the same error, as `open_arena` does."""

    def own(self) -> None:  # noqa: B027  # nothing was lent by default
        """Take over the addresses that another arena has lent (`open_arena`); the caller closes that arena afterwards.
        Before `own`, `close` frees the memory and leaves the addresses to the other arena. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory; idempotent."""

    def keep(self) -> None:  # noqa: B027
        """Called instead of `close`: all memory stays mapped, here and on the peers, until the process ends.
        Idempotent."""


def check_nbytes(nbytes: int, least: int = 1) -> None:
    """Raises `InvalidArgument` for an arena of an impossible size."""
    if not least <= nbytes <= MAX_NBYTES:
        raise InvalidArgument(f"an arena of {nbytes} bytes; allowed are {least} to {MAX_NBYTES}")


def check_view(nbytes: int, bases: Sequence[int], rank: int, offset: int, shape: Sequence[int], size: int) -> None:
    """Raises `InvalidArgument` if a view at `offset` into rank `rank`'s block, of elements of `size` bytes, leaves the
    block of `nbytes` bytes or is not aligned to its elements."""
    if not 0 <= rank < len(bases):
        raise InvalidArgument(f"rank {rank} is not in 0..{len(bases) - 1}")
    if any(length < 0 for length in shape):
        raise InvalidArgument(f"shape {tuple(shape)} has a negative length")
    end = offset + math.prod(shape) * size
    if offset < 0 or end > nbytes:
        raise InvalidArgument(f"bytes {offset}..{end} are not inside the block of {nbytes} bytes")
    if offset % size:
        raise InvalidArgument(f"offset {offset} is not a multiple of the element size {size}")


def raw_view(address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Tensor over memory that torch does not own; the caller keeps the memory alive."""
    # Not __cuda_array_interface__: torch then asks CUDA which GPU owns the address, and silently copies if that is not
    # `device` (pytorch#54139), as can happen for a peer's memory. This way also works for every dtype.
    nbytes = math.prod(shape) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    tensor = torch.empty(0, dtype=dtype, device=device)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return tensor.set_(storage, 0, tuple(shape), strides)


def host_view(memory: object, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a buffer of this process; the tensor keeps the buffer alive."""
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


class RecordFormat:
    """Records that tell other ranks of a rank's memory: a common header, and fields that depend on the kind of memory.

        magic 4 | version 2 | rank 2 | bytes of memory 8 | fields of the kind

    `rest` is the `struct` format of the fields after the header.
    """

    def __init__(self, magic: bytes, rest: str) -> None:
        self._magic, self._layout = magic, struct.Struct(f"<4sHHQ{rest}")

    def pack(self, rank: int, nbytes: int, *rest: Any) -> bytes:
        return self._layout.pack(self._magic, _VERSION, rank, nbytes, *rest)

    def parse(self, data: bytes, rank: int, nbytes: int) -> tuple[Any, ...]:
        """The fields after the header of rank `rank`'s record for `nbytes` bytes; raises `RendezvousError` for any
        other record. Pure."""
        if len(data) != self._layout.size:
            raise RendezvousError(f"rank {rank}'s memory record has {len(data)} bytes, expected {self._layout.size}")
        magic, version, sender, size, *rest = self._layout.unpack(data)
        if magic != self._magic or version != _VERSION:
            raise RendezvousError(f"rank {rank}'s memory record is not of version {_VERSION}: mixed tricomm versions?")
        if sender != rank:
            raise RendezvousError(f"rank {rank}'s memory record says that it is rank {sender}'s")
        if size != nbytes:
            raise RendezvousError(f"rank {rank} shares {size} bytes, this rank shares {nbytes}: use the same size")
        return tuple(rest)
