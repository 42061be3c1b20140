"""The rendezvous of a communicator's ranks, and the set-up of their shared memory, or of NCCL alone.

On a CPU the ranks must be on one node and share memory. On GPUs NCCL (`Options.nccl`) serves groups whose ranks share
no memory: groups that span nodes, and machines without peer access. All ranks get the same result, because the
rendezvous and the opening of an arena succeed on all of them or fail on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Protocol

import torch
from torch.distributed.distributed_c10d import Store

from tricomm import env
from tricomm.core import nccl, topology_agreement
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError, TricommError
from tricomm.kernels import layout
from tricomm.kernels.launch import compiler, interpreter
from tricomm.metrics.counters import NCCL
from tricomm.metrics.flight_recorder import FlightRecorder
from tricomm.options import Options, digest_of, seconds, with_environment
from tricomm.policy import backend_choice, launch_shapes
from tricomm.policy.backend_choice import Router
from tricomm.store.arenas.arena import Arena
from tricomm.store.arenas.open_arena import open_arena
from tricomm.store.control import ControlPage, Fault
from tricomm.store.handshake import SpansNodes, handshake, refuse
from tricomm.store.rendezvous import open_store
from tricomm.store.store_control import open_store_control
from tricomm.topology.model import Topology

log = logging.getLogger("tricomm")
_TELL_SECONDS = 2.0  # to tell the other ranks that this one does not join
_NO_NCCL_ON_CPU = 'there is no NCCL for CPU tensors; the backend "tricomm" of torch.distributed sends them over TCP'


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms on which a rank joins a group.

    timeout, rendezvous_timeout  bound each step, and the rendezvous, in seconds
    router    for a group of `torch.distributed` or of an inference engine, which makes the calls that the router does
              not send to the kernels, and has compared the ranks' environments; None: this group makes one
    recorder  the flight recorder of such a group; None: this group makes one
    on_wait   is called periodically while this rank waits for the others at the rendezvous; an error that it raises
              ends the rendezvous on all ranks
    """

    rank: int
    world_size: int
    device: torch.device
    timeout: float
    rendezvous_timeout: float
    options: Options
    layout: layout.Layout
    router: Router | None = None
    recorder: FlightRecorder | None = None
    on_wait: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Shared:
    """The memory and the facts that the ranks of a group share, and `Terms.recorder`; the group owns the control page
    and the arena. `origin`: the group from which this one was made, in words; empty for a new one."""

    control: ControlPage
    arena: Arena
    layout: layout.Layout
    topology: Topology | None
    routes: backend_choice.GroupFacts
    recorder: FlightRecorder | None = None
    origin: str = ""


class Rejoining(Protocol):
    """How a rank meets the ranks with which it makes a group from an earlier one.

    lender   this rank's arena of the earlier group, if the new one uses its addresses
    origin   the earlier group, in words
    """

    lender: Arena | None

    @property
    def origin(self) -> str: ...

    def connect(self) -> ControlPage:
        """The pages of the group's ranks."""

    def met(self, control: ControlPage) -> None:
        """Called with the pages of `connect`, on all ranks together."""


class NoArena(Arena):
    """An empty arena, for ranks that share no memory."""

    kind = "none"
    nbytes = 0
    no_multicast = "the ranks share no memory"
    no_suspend = "the ranks share no memory that could be freed; close the communicator, and make a new one"

    def __init__(self, world_size: int) -> None:
        self.bases = (0,) * world_size

    def _view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise InvalidArgument("the ranks of this communicator share no memory")

    def close(self) -> None:
        pass


def terms(
    rank: int,
    world_size: int,
    device: torch.device | str | int | None,
    timeout: float | timedelta | None,
    options: Options,
    rendezvous_timeout: float | None = None,
) -> Terms:
    """The terms from the arguments of a `Communicator`; raises `InvalidArgument` for an impossible group."""
    limit = options.timeout if timeout is None else seconds(timeout, "timeout")
    chosen = pick_device(device)
    memory = layout_of(world_size, chosen, options)
    return Terms(rank, world_size, chosen, limit, rendezvous_timeout or limit, options, memory)


def settings(store: Store, rank: int, world_size: int, options: Options | None) -> Options:
    """`options`, or the defaults, with the settings that environment variables make for every group. If these are
    invalid, raises `InvalidArgument`, and tells the other ranks."""
    try:
        return with_environment(options)
    except InvalidArgument as error:
        refuse(store, rank, world_size, _TELL_SECONDS, error)
        raise


def refuse_at(url: str, error: InvalidArgument) -> None:
    """If a launcher has started this rank, tell the ranks that meet at `url` that this one has no valid rank."""
    if env.text("RANK") or env.text("WORLD_SIZE"):
        with suppress(TricommError):  # not as rank 0, which would host a store
            refuse(open_store(url, 1, 2, _TELL_SECONDS)[0], -1, 1, _TELL_SECONDS, error)


def fallback(device: torch.device, options: Options) -> tuple[str | None, str]:
    """(name of the backend for calls that the kernels do not support, or None; the reason why there is none)."""
    if device.type == "cpu":
        return None, _NO_NCCL_ON_CPU
    return (NCCL, "") if options.nccl else (None, "Options(nccl=False)")


def pick_device(device: torch.device | str | int | None) -> torch.device:
    """The device of that name; None: the current GPU, or the CPU if there is none. Raises `InvalidArgument`."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device={device!r}: {error}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device={device!r}: a CPU or a CUDA device is needed")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidArgument(f"device={device!r}: this process sees no CUDA device")
        if chosen.index is None:
            chosen = torch.device("cuda", _index())
        count = torch.cuda.device_count()
        if not 0 <= chosen.index < count:
            names = ", ".join(f"cuda:{n} ({torch.cuda.get_device_name(n)})" for n in range(count))
            raise InvalidArgument(
                f"device={device!r}: there is no such GPU in this process, which sees {names}; look at "
                "CUDA_VISIBLE_DEVICES"
            )
    return torch.device("cpu") if chosen.type == "cpu" else chosen


def _index() -> int:
    """The current device; if that is the first one, the device that LOCAL_RANK names, which torchrun sets."""
    index = torch.cuda.current_device()
    return index or env.foreign("LOCAL_RANK") % torch.cuda.device_count()


def layout_of(world_size: int, device: torch.device, options: Options) -> layout.Layout:
    """The layout of a group's memory; raises `InvalidArgument` for an impossible group."""
    reason = interpreter.supported()
    if reason is not None and device.type == "cpu":
        raise InvalidArgument(f"no kernel can run on the CPU: {reason}")
    reason = compiler.refused()
    if reason is not None and device.type == "cuda":
        raise InvalidArgument(f"no kernel can run on a GPU: {reason}")
    if world_size > layout.MAX_WORLD_SIZE and fallback(device, options)[0] is None:
        raise InvalidArgument(f"world_size={world_size}: at most {layout.MAX_WORLD_SIZE} ranks are possible")
    topology_agreement.check(options, world_size)
    memory = layout.plan(min(world_size, layout.MAX_WORLD_SIZE), options.arena_bytes)
    launch_shapes.check_device(device.type, memory, options._tuning.tile)
    return memory


def join(undo: ExitStack, store: Store, terms: Terms) -> Shared:
    """Meet over `store` and share memory, as `Communicator` says; every rank calls it. `undo` releases everything."""
    device, options, rank, world_size = terms.device, terms.options, terms.rank, terms.world_size
    native, missing = fallback(device, options)
    agreed, limit = digest(terms), terms.rendezvous_timeout
    why: str | None = None
    nodes = 1
    # Each resource is on the stack before the next line runs, because an interrupt may happen between the two.
    try:
        undo.push(partial(leave, control := handshake(store, rank, world_size, limit, agreed, terms.on_wait)))
    except (SpansNodes, ResourceError) as error:
        if native is None:
            if isinstance(error, SpansNodes):
                raise RendezvousError(f"{error}; {missing}") from error
            raise
        why = str(error)
        control, names = open_store_control(store, rank, world_size, limit, agreed)
        undo.push(partial(leave, control))
        nodes = len(set(names))
    return _share(undo, control, terms, why, nodes)


def rejoin(undo: ExitStack, way: Rejoining, terms: Terms) -> Shared:
    """As `join`, for ranks that are or were in a group and, with `replace`, new ones."""
    undo.push(partial(leave, control := way.connect()))
    way.met(control)
    return replace(_share(undo, control, terms, lender=way.lender), origin=way.origin)


def digest(terms: Terms) -> int:
    """A number that differs if two ranks' terms do not fit together."""
    return digest_of(terms.options, terms.layout, terms.device.type)


def _share(
    undo: ExitStack,
    control: ControlPage,
    terms: Terms,
    why: str | None = None,
    nodes: int = 1,
    lender: Arena | None = None,
) -> Shared:
    """Share memory among ranks that have met, unless `why` gives a reason against it. With a `lender`, its addresses
    are used."""
    device, options, world_size = terms.device, terms.options, terms.world_size
    native, missing = fallback(device, options)
    topology: Topology | None = None
    arena: Arena = NoArena(world_size)
    if why is None and world_size > layout.MAX_WORLD_SIZE:
        why = f"the kernels take up to {layout.MAX_WORLD_SIZE} ranks, here are {world_size}"
    if why is None:
        limit = terms.timeout if control.limit is None else control.limit.left
        topology = topology_agreement.agree(control, options, device, limit)
        reach = topology_agreement.reach(topology, terms.rank)
        try:
            nbytes = terms.layout.nbytes
            undo.callback((arena := open_arena(control, nbytes, device, limit, reach, True, lender)).close)
        except ResourceError as error:  # the same on all ranks, with everything undone
            if native is None:
                raise
            why = f"the ranks cannot share memory: {error}"
    if why is not None and native is not None:
        _only_nccl(control, why, terms.timeout)
    routes = backend_choice.GroupFacts(
        device.type, world_size, nodes, why, native, missing, all(arena.bases), options.batch_invariant
    )
    return Shared(control, arena, terms.layout, topology, routes, terms.recorder)


def leave(
    control: ControlPage, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Close the page of a set-up that has failed. The other ranks are told the reason, and raise an error of the same
    class if it is a `TricommError`."""
    if error is not None:
        named = type(error) if isinstance(error, TricommError) else GroupAborted
        text = f"rank {control.rank} was stopped by {type(error).__name__}: {error}"
        control.raise_fault(Fault(named.__name__, control.rank, 0, text))
    control.close()


def _only_nccl(control: ControlPage, why: str, timeout: float) -> None:
    """Raise on all ranks if NCCL is missing, because then no call could be made."""
    try:
        nccl.load(control, timeout)
    except ResourceError as error:
        raise ResourceError(f"no kernel can run: {why}; and {error}") from error
    if control.rank == 0:
        log.warning("every call goes to NCCL: %s", why)
