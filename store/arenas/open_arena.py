"""Opens the memory that every rank of a group can reach, and chooses its kind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from tricomm import env
from tricomm.deadline import Deadline
from tricomm.errors import InvalidArgument, ResourceError, TricommError
from tricomm.store.arenas.arena import Arena
from tricomm.store.collective_stages import CollectiveStages
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import DESCRIPTOR, FABRIC, Driver, load_driver

if TYPE_CHECKING:
    from tricomm.store.arenas.cuda_arena import CudaArena

_log = logging.getLogger("tricomm")
_SETTING = {b"ipc": "TRICOMM_CUDA_VMM=0", b"descriptor": "no TRICOMM_CUDA_VMM=fabric"}


def open_arena(
    control: ControlPage, nbytes: int, device: torch.device, timeout: float, reach: Sequence[bool] | None = None,
    multicast: bool = False, lender: Any = None,
) -> Arena:  # fmt: skip
    """Zeroed memory of `nbytes` bytes on each rank's `device`, mapped by all; called by all ranks together.

    On GPUs `reach[r]` says whether this rank maps rank r's memory (both ranks pass the same value); if not, its address
    is 0. `multicast`: also set up a multicast address, if the machine has and permits it. `lender`: this rank's
    suspended arena of the same size. If the new arena is of the same kind, it uses the lender's addresses, which belong
    to the lender until `Arena.own`.

    Raises the same error on all ranks, with everything undone: `ResourceError` if memory is refused,
    `InvalidArgument` for a bad size or device. Takes `timeout` seconds at most.
    """
    if device.type == "cpu":
        from tricomm.store.arenas.posix_shm import open_posix_shm

        return open_posix_shm(control, nbytes, timeout, lender)
    if device.type == "cuda":
        deadline = Deadline(timeout)
        arena = open_cuda(control, nbytes, device, timeout, reach=reach, lender=lender)
        with ExitStack() as undo:
            undo.callback(arena.close)
            if multicast:
                arena.look_for_switch(deadline)
            undo.pop_all()
        return arena
    raise InvalidArgument(f"device={device}: a CPU or a CUDA device is needed")


def open_cuda(
    control: ControlPage, nbytes: int, device: torch.device, timeout: float, driver: Driver | None = None,
    reach: Sequence[bool] | None = None, lender: CudaArena | None = None,
) -> CudaArena:  # fmt: skip
    """`open_blocks` with memory shared by file descriptors. A rank may ask for fabric handles
    (TRICOMM_CUDA_VMM=fabric); legacy CUDA IPC is the fallback if a rank cannot share by descriptors, or must not
    (TRICOMM_CUDA_VMM=0). `CudaArena.reason` says why. Raises as `open_blocks` does, with the reasons of all kinds."""
    from tricomm.store.arenas.cuda_ipc import open_cuda_ipc
    from tricomm.store.arenas.cuda_vmm import open_cuda_vmm

    deadline = Deadline(timeout)
    wanted = CollectiveStages(control, "GPU memory", deadline).gather("kind", lambda: env.gpu_memory().encode())

    def vmm(sharing: str, *forbidding: bytes) -> CudaArena:
        against = [rank for rank, answer in enumerate(wanted) if answer in forbidding]
        if against:
            raise ResourceError(f"{_SETTING[wanted[against[0]]]} on rank(s) {against}")
        return open_cuda_vmm(control, nbytes, device, deadline.left, driver, reach, sharing, lender)

    ways: list[tuple[str, Callable[[], CudaArena]]] = [
        ("descriptors", lambda: vmm(DESCRIPTOR, b"ipc")),
        ("legacy CUDA IPC", lambda: open_cuda_ipc(control, nbytes, device, deadline.left, driver, reach)),
    ]
    if b"fabric" in wanted:
        ways.insert(0, ("fabric handles", lambda: vmm(FABRIC, b"ipc", b"descriptor")))
    refusals: list[str] = []
    for name, opened in ways:
        try:
            arena = opened()
        except ResourceError as error:  # the same on all ranks, with everything undone
            refusals.append(str(error))
            continue
        if name != "descriptors" or refusals:
            why = "; and before that ".join(reversed(refusals)) or "TRICOMM_CUDA_VMM=fabric"
            arena.reason = f"{name}, because {why}"
            arena.no_suspend += f" ({arena.reason})" * bool(arena.no_suspend)
            if control.rank == 0:
                _log.info("GPU memory is shared by %s", arena.reason)
        return arena
    raise ResourceError("; and before that ".join(reversed(refusals)))


def expected_kind(gpus: int) -> tuple[str, str]:
    """The kind of memory that ranks on this machine's GPUs (without GPUs, on its CPU) are likely to share, and why it
    is not the default kind. The ranks make the actual choice together."""
    if not gpus:
        return "posix_shm", ""
    try:
        wish = env.gpu_memory()
        if wish == "ipc":
            return "cuda_ipc", "TRICOMM_CUDA_VMM=0"
        driver = load_driver()
        driver.init()

        def refusal(sharing: str) -> str:
            refusals = (driver.vmm_refusal(ordinal, sharing) for ordinal in range(gpus))
            return next((text for text in refusals if text is not None), "")

        against = refusal(FABRIC) if wish == "fabric" else ""
        if wish == "fabric" and not against:
            return "cuda_vmm", "fabric handles, because TRICOMM_CUDA_VMM=fabric"
        reason = refusal(DESCRIPTOR)
    except TricommError as error:
        return "cuda_ipc", str(error)
    if reason:
        return "cuda_ipc", reason
    return "cuda_vmm", f"descriptors, because {against}" if against else ""


def no_multicast_expected(gpus: int) -> str:
    """Why ranks on this machine's GPUs will probably have no multicast address; empty if they probably will. Only the
    ranks together can find out."""
    kind, _ = expected_kind(gpus)
    if kind != "cuda_vmm":
        return f"memory of kind {kind} has none"
    if not env.multicast():
        return "TRICOMM_MULTICAST=0 or NCCL_NVLS_ENABLE=0"
    try:
        return next((text for text in map(load_driver().multicast_refusal, range(gpus)) if text is not None), "")
    except TricommError as error:
        return str(error)
