"""Memory of one shape on every rank that all ranks of a communicator can reach."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tricomm.errors import GroupAborted, InvalidArgument
from tricomm.store.arenas.arena import Arena, raw_view

_NOT_PLAIN = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4} | {
    getattr(torch, f"bits{name}") for name in ("1x8", "2x4", "4x2", "8", "16") if hasattr(torch, f"bits{name}")
}


class HandleName(NamedTuple):
    """The name of a handle on all ranks: the `number`th of the communicator `group`. `rank` is this rank's number."""

    group: str
    number: int
    rank: int


class Symmetric:
    """A tensor on every rank, mapped by all ranks.

    local   this rank's tensor, of the given shape and dtype
    peers   a tuple with every rank's tensor, including this rank's; pass it to a kernel as it is
    table   int64 [world_size] on the communicator's device: the addresses of `peers`
    multicast     the multicast address of all ranks' tensors, for a switch's instructions (`multimem`), or 0; then
                  `no_multicast` says why (empty on a CPU, whose interpreter needs none)

    `Communicator.symmetric` allocates it. `Communicator.register` makes one of a user's tensor, which the user still
    owns: `local` is a view of it, and `close` does not free it. It is never zeroed.

    It lives until `close()` or until its communicator is closed; using it later raises `GroupAborted`. Its memory
    starts zeroed. While the communicator is suspended, using it raises `InvalidArgument`; `resume` zeroes it again, at
    the same addresses. `group`, the communicator's name, and `number` identify it on all ranks.
    """

    def __init__(
        self,
        arena: Arena,
        name: HandleName,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        tensor: torch.Tensor | None = None,
        released: Callable[[], object] = lambda: None,
    ) -> None:
        self._arena, self._released = arena, released
        self.group, self.number, rank = name.group, name.number, name.rank
        self._closed = False
        self.shape = shape
        self.dtype = dtype
        peers = [arena.tensor(r, 0, shape, dtype) for r in range(len(arena.bases))]
        self._given, self._rank = tensor, rank
        if tensor is not None:
            # keeps the memory that peers reach alive, even if the user gives the tensor other memory
            peers[rank] = tensor.detach()
        self._peers, self._local = tuple(peers), peers[rank]
        self.multicast, self.no_multicast = arena.multicast, arena.no_multicast
        words = [*arena.bases, arena.multicast]
        self._addresses = torch.tensor(words, dtype=torch.int64, device=self._local.device)
        self._table = self._addresses[:-1]
        self._rows: OwnRows | None = None

    @property
    def local(self) -> torch.Tensor:
        self._check()
        return self._local

    @property
    def peers(self) -> tuple[torch.Tensor, ...]:
        self._check()
        return self._peers

    @property
    def table(self) -> torch.Tensor:
        self._check()
        return self._table

    @property
    def addresses(self) -> torch.Tensor:
        """`table` followed by `multicast`, an argument of shipped kernels."""
        self._check()
        return self._addresses

    @property
    def rows(self) -> OwnRows:
        """Row r of rank r's tensor, for every rank r. Raises `InvalidArgument` if rows would differ in size."""
        self._check()
        if self._rows is None:
            world_size = len(self._peers)
            if not self.shape or self.shape[0] % world_size:
                raise InvalidArgument(
                    f"symmetric: shape {self.shape}: dimension 0 is not a multiple of the world size {world_size}"
                )
            nbytes = self._local.nbytes // world_size
            addresses = [base + rank * nbytes for rank, base in enumerate(self._arena.bases)]
            table = torch.tensor(addresses, dtype=torch.int64, device=self._addresses.device)
            self._rows = OwnRows(table, -self.number)
        return self._rows

    def lend(self, shape: Sequence[int], given_back: Callable[[], None]) -> torch.Tensor:
        """This rank's tensor in `shape`, with a separate storage; `given_back` is called, in any thread, when no tensor
        uses that storage any more."""
        local = self.local
        lent = raw_view(local.data_ptr(), tuple(shape), self.dtype, local.device)
        # The mapping lives as long as the storage, also after `close`.
        weakref.finalize(lent.untyped_storage(), _given_back, given_back, local).atexit = False
        return lent

    def close(self) -> None:
        """Release the memory; collective over CUDA IPC. Idempotent; views of it are then invalid."""
        if not self._closed:
            self._closed = True
            self._peers, self._rows = (), None
            self._local = self._addresses = self._table = torch.empty(0, device="cpu")
            self._given = None
            try:
                self._arena.close()
            finally:
                self._released()

    def _check(self) -> None:
        if self._closed:
            raise GroupAborted("this symmetric memory is closed")
        if self._given is not None and self._given.data_ptr() != self._arena.bases[self._rank]:
            raise InvalidArgument(
                "this registered tensor has other memory now (.data, set_ or resize_) than what the peers reach: close "
                "the handle on all ranks, and register it again"
            )
        if self._arena.closed:
            raise GroupAborted("this symmetric memory is closed with its communicator")
        if self._arena.suspended:
            raise InvalidArgument("this symmetric memory is suspended with its communicator: resume() comes first")


@dataclass(frozen=True, eq=False)
class OwnRows:
    """Row r of rank r's symmetric tensor, for every rank r: the inputs of an in-place all_gather.

    addresses   int64 [world_size]: the addresses of the rows
    number      identifies the rows on all ranks; never equal to the number of a whole tensor
    """

    addresses: torch.Tensor
    number: int


def _given_back(given_back: Callable[[], None], local: torch.Tensor) -> None:
    given_back()


def check_shape(shape: object, dtype: object) -> tuple[tuple[int, ...], InvalidArgument | None]:
    """The shape as a tuple, and the error if it or `dtype` is invalid, else None."""
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        return (), InvalidArgument(f"shape={shape!r}: a sequence of positive integers is needed")
    plain = isinstance(dtype, torch.dtype) and dtype not in _NOT_PLAIN
    if not plain:
        return sizes, InvalidArgument(f"dtype={dtype!r}: a plain number type is needed")
    return sizes, None


def nbytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor, rounded up to whole pages of 4096."""
    return max(1, -(-math.prod(shape) * dtype.itemsize // 4096)) * 4096
