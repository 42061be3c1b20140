"""Memory that every rank of a group can reach, of any kind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from tricomm import env
from tricomm.deadline import Deadline
from tricomm.errors import InvalidArgument, ResourceError, TricommError
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import Driver, load_driver

if TYPE_CHECKING:
    from tricomm.store.cuda.cuda_arena import CudaArena

_log = logging.getLogger("tricomm")


class Arena(Protocol):
    """One block of `nbytes` bytes per rank; `bases[r]` is the address of rank r's block as mapped here."""

    @property
    def kind(self) -> str:
        """What the memory is: "posix_shm", "cuda_vmm", "cuda_ipc" or "local"."""

    @property
    def reason(self) -> str:
        """Why the memory is not of the usual kind; empty if it is."""

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
        return open_cuda(control, nbytes, device, timeout, reach=reach)
    raise InvalidArgument(f"device={device}: a CPU or a CUDA device is needed")


def open_cuda(
    control: ControlPage, nbytes: int, device: torch.device, timeout: float, driver: Driver | None = None,
    reach: Sequence[bool] | None = None,
) -> CudaArena:  # fmt: skip
    """`open_blocks` of memory that is shared by descriptors; of legacy CUDA IPC if a rank cannot, or must not
    (TRICOMM_CUDA_VMM=0). `CudaArena.reason` says why. Raises as `open_blocks`, with both reasons."""
    from tricomm.store.cuda.cuda_ipc import open_cuda_ipc
    from tricomm.store.cuda.cuda_vmm import open_cuda_vmm

    deadline = Deadline(timeout)
    wanted = control.exchange(b"\x01" if env.memory_by_descriptor() else b"\x00", "kind of memory", deadline.left)
    unwanted = [rank for rank, answer in enumerate(wanted) if answer != b"\x01"]
    try:
        if unwanted:
            raise ResourceError(f"TRICOMM_CUDA_VMM=0 on rank(s) {unwanted}")
        return open_cuda_vmm(control, nbytes, device, deadline.left, driver, reach)
    except ResourceError as error:  # the same on all ranks, with everything undone
        try:
            arena = open_cuda_ipc(control, nbytes, device, deadline.left, driver, reach)
        except ResourceError as second:
            raise ResourceError(f"{second}; and before that {error}") from second
        arena.reason = f"legacy CUDA IPC, because {error}"
        if control.rank == 0:
            _log.info("GPU memory is shared by %s", arena.reason)
        return arena


def expected_kind(gpus: int) -> tuple[str, str]:
    """The kind of memory that ranks on this machine's GPUs are likely to share, or on its CPU if there are none, and
    why it is not the usual one. The ranks decide together."""
    if not gpus:
        return "posix_shm", ""
    try:
        if not env.memory_by_descriptor():
            return "cuda_ipc", "TRICOMM_CUDA_VMM=0"
        driver = load_driver()
        driver.init()
        refusals = [driver.vmm_refusal(ordinal) for ordinal in range(gpus)]
    except TricommError as error:
        return "cuda_ipc", str(error)
    reason = next((text for text in refusals if text is not None), "")
    return ("cuda_ipc", reason) if reason else ("cuda_vmm", "")
