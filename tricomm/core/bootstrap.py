"""How the ranks of a communicator come together, and what they have in common then: memory, or only NCCL.

On a CPU the ranks share memory, or there is no group. On GPUs NCCL (`Options.nccl`) takes the groups whose ranks do
not: those that span nodes, boxes without peer access. That is found by all ranks together, for the meeting and the
opening of an arena end alike on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch
from torch.distributed.distributed_c10d import Store

from tricomm.core import nccl, topology_agreement
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError, TricommError
from tricomm.kernels import layout
from tricomm.options import Options
from tricomm.policy import backend_choice
from tricomm.store.arena import Arena, open_arena
from tricomm.store.control import ControlPage, Fault
from tricomm.store.handshake import SpansNodes, handshake
from tricomm.store.store_control import open_store_control
from tricomm.topology.model import Topology

log = logging.getLogger("tricomm")
_GLOO = 'the backend "tricomm" of torch.distributed has Gloo behind it'


@dataclass(frozen=True)
class Joined:
    """What a communicator takes over."""

    control: ControlPage
    arena: Arena
    topology: Topology | None
    routes: backend_choice.GroupFacts


class NoArena:
    """Stands for the memory of ranks that share none."""

    kind = "none"
    nbytes = 0

    def __init__(self, world_size: int) -> None:
        self.bases = (0,) * world_size

    def tensor(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise InvalidArgument("the ranks of this communicator share no memory")

    def close(self) -> None:
        pass

    def keep(self) -> None:
        pass


def behind(device: torch.device, options: Options) -> tuple[str | None, str]:
    """Who serves what the kernels do not, and why there is nobody, if there is nobody."""
    if device.type == "cpu":
        return None, f"there is no NCCL for CPU tensors; {_GLOO}"
    return (backend_choice.NCCL, "") if options.nccl else (None, "Options(nccl=False)")


def join(
    undo: ExitStack, store: Store, rank: int, world_size: int, device: torch.device, timeout: float,
    meeting_timeout: float, options: Options, arena_layout: layout.Layout, look: Callable[[], None],
) -> Joined:  # fmt: skip
    """Meet over `store` and share memory, as `Communicator` says; every rank calls it. `undo` gives it all back."""
    native, missing = behind(device, options)
    agreed = options.agreed(arena_layout, device.type)
    why: str | None = None
    nodes = 1
    # What is opened is on the stack before the next line, where an interrupt may come.
    try:
        undo.push(partial(_leave, control := handshake(store, rank, world_size, meeting_timeout, agreed, look)))
    except (SpansNodes, ResourceError) as error:
        if native is None and isinstance(error, SpansNodes):
            raise RendezvousError(f"{error}. {missing}") from error
        if native is None:
            raise
        why = str(error)
        control, nodes = open_store_control(store, rank, world_size, meeting_timeout, agreed)
        undo.push(partial(_leave, control))
    topology: Topology | None = None
    arena: Arena = NoArena(world_size)
    if why is None and world_size > layout.MAX_WORLD_SIZE:
        why = f"the kernels take up to {layout.MAX_WORLD_SIZE} ranks, here are {world_size}"
    if why is None:
        topology = topology_agreement.agree(control, options, device, timeout)
        reach = topology_agreement.reach(topology, rank)
        try:
            undo.callback((arena := open_arena(control, arena_layout.nbytes, device, timeout, reach)).close)
        except ResourceError as error:  # the same on all ranks, with everything undone
            if native is None:
                raise
            why = f"the ranks cannot share memory: {error}"
    if why is not None:
        _only_nccl(control, why, timeout)
    routes = backend_choice.GroupFacts(device.type, world_size, nodes, why, native, missing)
    return Joined(control, arena, topology, routes)


def _leave(
    control: ControlPage, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Close the page of a set-up that has failed; the others hear what has stopped this rank."""
    if error is not None and not isinstance(error, TricommError):
        text = f"rank {control.rank} was stopped by {type(error).__name__}: {error}"
        control.raise_fault(Fault(GroupAborted.__name__, control.rank, 0, text))
    control.close()


def _only_nccl(control: ControlPage, why: str, timeout: float) -> None:
    """No call can be made without it, so that it is missing is said here, on all ranks."""
    try:
        nccl.load(control, timeout)
    except ResourceError as error:
        raise ResourceError(f"no kernel can run: {why}; and {error}") from error
    if control.rank == 0:
        log.warning("every call goes to NCCL: %s", why)
