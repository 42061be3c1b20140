"""Memory that every rank of a group can reach, of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tricomm.errors import InvalidArgument
from tricomm.store.control import ControlPage


class Arena(Protocol):
    """One block of `nbytes` bytes per rank; `bases[r]` is the address of rank r's block as mapped here."""

    @property
    def kind(self) -> str:
        """What the memory is: "posix_shm", "cuda_ipc" or "local"."""

    @property
    def nbytes(self) -> int: ...

    @property
    def bases(self) -> tuple[int, ...]: ...

    def tensor(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """View of rank `rank`'s block from byte `offset` on; `InvalidArgument` if it would leave the block."""

    def close(self) -> None:
        """Let the memory go; idempotent."""

    def keep(self) -> None:
        """In place of `close`: all of it stays as it is until the process ends, here and at the peers. Idempotent."""


def open_arena(
    control: ControlPage, nbytes: int, device: torch.device, timeout: float, reach: Sequence[bool] | None = None
) -> Arena:
    """Zeroed memory of `nbytes` bytes on each rank's `device`, mapped by all; called by all ranks together.

    On GPUs `reach` says for each rank if this rank maps its memory, alike at both ends; if not, its address is 0.

    Raises the same error on all ranks, with everything undone: `ResourceError` if memory is refused,
    `InvalidArgument` for a bad size or device. Takes `timeout` seconds at most.
    """
    if device.type == "cpu":
        from tricomm.store.posix_shm import open_posix_shm

        return open_posix_shm(control, nbytes, timeout)
    if device.type == "cuda":
        from tricomm.store.cuda_ipc import open_cuda_ipc

        return open_cuda_ipc(control, nbytes, device, timeout, reach=reach)
    raise InvalidArgument(f"device={device}: a CPU or a CUDA device is needed")
