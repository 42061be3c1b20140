"""The capabilities that the ranks of a c10d group exchange over the group's store when it is made.

Each rank publishes a record of its process, its node and the features that its environment allows. All ranks read all
records, so they reach the same conclusion. Ranks are on one node if their boot ids are equal, whatever the host names
are; `TRICOMM_NODE_ID` overrides that. Whether the ranks of a node can share memory is only known when the kernels'
communicator is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from tricomm import env
from tricomm.c10d.work_handles import limit_seconds
from tricomm.core.bootstrap import pick_device
from tricomm.errors import InvalidArgument, RendezvousError
from tricomm.kernels.collectives.registry import WIRES
from tricomm.kernels.launch import compiler, interpreter
from tricomm.metrics import publish
from tricomm.options import Options
from tricomm.policy import backend_choice, selection
from tricomm.store import process
from tricomm.store.departures import USUAL, Rules
from tricomm.store.generation import Generation
from tricomm.store.records import Capabilities

_CPU_KERNELS, _CHECK, _CUDA_KERNELS, _CPU_POSSIBLE, _BATCH_INVARIANT = 1, 2, 4, 8, 16
_WIRE_BIT = 5  # this bit and those above are the index of `Options.wire` in `_WIRES`
_WIRES = (None, *WIRES)
# A job may make hundreds of groups, and interpreted kernels gain little from more: a 16 MiB all_reduce takes 7.8 s with
# this and 5.3 s with 64 MiB (2 ranks, simulated).
_CPU_ARENA_BYTES = 4 << 20


@dataclass(frozen=True)
class GroupConfig:
    """The arguments of a group: this process's rank in it, its global `ranks`, its name, and a store that no other
    group uses."""

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    ranks: list[int]
    name: str

    def __str__(self) -> str:
        return f"c10d group {self.name!r}, rank {self.rank} of {self.world_size}"


@dataclass(frozen=True)
class GroupCapabilities:
    """The result of the exchange, equal on all ranks.

    `members` are the ranks' processes; `no_kernels` is the reason why no kernel runs on a device type; `check` is
    TRICOMM_CHECK; `generation` has the store for all keys of the group; `batch_invariant`: whether bits of reductions
    depend on rank order alone; `wire`: how sums are quantised on the links, None if they are not.
    """

    members: tuple[Capabilities, ...]
    nodes: int
    check: bool
    no_kernels: dict[str, str | None]
    generation: Generation[Capabilities] = field(compare=False)
    batch_invariant: bool = False
    wire: str | None = None


def exchange_capabilities(
    store: Any,
    rank: int,
    world_size: int,
    timeout: float,
    settings: Callable[[], Options] = Options,
    known: Mapping[int, Capabilities] | None = None,
    rules: Rules = USUAL,
) -> GroupCapabilities:
    """Exchange capabilities, and agree on a generation of the group; every rank of the group calls it, with the same
    `batch_invariant` and `wire` in its `settings`. `known` are the processes of ranks that are known in advance.

    `settings` reads this rank's settings. If they are invalid, its error is raised here and told to all ranks at once,
    so that they do not wait for this rank.

    Raises `RendezvousError` that names the ranks without a record after `timeout` seconds, or the rank with a wrong
    record and what is wrong with it; `PeerDied` if the process of a rank ends meanwhile. All ranks read the same
    records, which were written for this group. So under TRICOMM_TOKEN a process without the token can make the set-up
    fail by writing to the store, but cannot change its result.
    """
    generation = Generation(store, "capabilities", Capabilities, rank, world_size, timeout, known, rules)

    return _conclude(generation.agree(lambda: _own_capabilities(settings())), generation)


def _own_capabilities(settings: Options) -> Capabilities:
    # Read now, because later an error would be raised on this rank alone.
    options_for(None, timedelta(0), "cpu")
    publish.interval()
    env.logs_routing()
    selection.shipped_tables()
    backend_choice.limits()
    switches = _CPU_KERNELS * cpu_through_kernels() | _CHECK * calls_are_compared()
    switches |= _CUDA_KERNELS * (not env.peer_access_disabled() and compiler.refused() is None)
    switches |= _CPU_POSSIBLE * (interpreter.supported() is None) | _BATCH_INVARIANT * settings.batch_invariant
    if settings.wire is not None and switches & _CUDA_KERNELS and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(pick_device("cuda"))
        selection.check_architecture(settings.wire, 10 * major + minor)
    switches |= _WIRES.index(settings.wire) << _WIRE_BIT
    pid = os.getpid()
    left = process.descriptors_left()
    return Capabilities(pid, process.start_time(pid) or 0, process.pid_namespace(), process.node_id(), switches, left)


def cpu_through_kernels() -> bool:
    """TRICOMM_CPU: "kernels" or "gloo" (unset: gloo); raises `InvalidArgument` for anything else."""
    route = env.text("TRICOMM_CPU")
    if route not in (None, "kernels", "gloo"):
        raise InvalidArgument(f"TRICOMM_CPU={route!r}: kernels or gloo is needed")
    return route == "kernels"


def calls_are_compared() -> bool:
    """TRICOMM_CHECK: True unless it is off; raises `InvalidArgument` for anything that is neither on nor off."""
    return env.text("TRICOMM_CHECK") is None or env.flag("TRICOMM_CHECK")


def _conclude(said: list[Capabilities], generation: Generation[Capabilities]) -> GroupCapabilities:
    common = ~0
    for one in said:
        common &= one.switches
    invariant = [rank for rank, one in enumerate(said) if one.switches & _BATCH_INVARIANT]
    if invariant and len(invariant) < len(said):
        others = [rank for rank in range(len(said)) if rank not in invariant]
        raise RendezvousError(
            f"rank(s) {invariant} ask for a batch-invariant group, rank(s) {others} do not: set "
            "TRICOMM_BATCH_INVARIANT, or Options.batch_invariant of pg_options, on every rank or on none"
        )
    cpu: str | None = "CPU tensors go over TCP unless TRICOMM_CPU=kernels on all ranks"
    if common & _CPU_KERNELS:
        cpu = None if common & _CPU_POSSIBLE else "the interpreter runs no kernels under some rank's Triton"
    cuda: str | None = "on some rank TRICOMM_P2P_DISABLE, NCCL_P2P_DISABLE or TRITON_INTERPRET is set"
    cuda = None if common & _CUDA_KERNELS else cuda
    nodes = len({one.node for one in said})
    no_kernels = {"cpu": cpu, "cuda": cuda}
    check, wire = bool(common & _CHECK), _common_wire(said)
    return GroupCapabilities(tuple(said), nodes, check, no_kernels, generation, bool(invariant), wire)


def _common_wire(said: list[Capabilities]) -> str | None:
    """`Options.wire` of all ranks; raises `RendezvousError` if they differ in it."""
    ranks: dict[int, list[int]] = {}
    for rank, one in enumerate(said):
        ranks.setdefault(one.switches >> _WIRE_BIT, []).append(rank)
    names = dict(enumerate(_WIRES))
    if len(ranks) > 1:
        asked = ", ".join(f"rank(s) {some} ask for wire={names.get(place)!r}" for place, some in ranks.items())
        raise RendezvousError(f"{asked}: set TRICOMM_WIRE, or Options.wire of pg_options, to the same on every rank")
    return names[next(iter(ranks))]


def torch_backend(device: str) -> str | None:
    """This torch's own backend for `device`: gloo, nccl or None."""
    if device == "cpu":
        return "gloo" if torch.distributed.is_gloo_available() else None
    return "nccl" if torch.distributed.is_nccl_available() else None


def options_for(given: Options | None, timeout: timedelta, device: str) -> Options:
    """The communicator's options: the caller's, else the group's timeout and TRICOMM_ARENA_BYTES."""
    chosen = _options_for(given, timeout, device)
    return chosen if env.compile_after_set_up() else replace(chosen, compile_after_set_up=False)


def _options_for(given: Options | None, timeout: timedelta, device: str) -> Options:
    if given is not None:
        return replace(given, nccl=False)  # a c10d group falls back to torch's own NCCL
    limit = limit_seconds(timeout)
    options = Options(nccl=False) if limit is None else Options(timeout=limit, nccl=False)
    nbytes = env.integer("TRICOMM_ARENA_BYTES")
    try:
        given = options if nbytes is None else replace(options, arena_bytes=nbytes)
    except InvalidArgument as error:
        raise InvalidArgument(f"TRICOMM_ARENA_BYTES={nbytes}: {error}") from None
    return replace(given, arena_bytes=_CPU_ARENA_BYTES) if nbytes is None and device == "cpu" else given
