"""The capabilities that the ranks of a c10d group tell each other, over the group's store, when it is made.

Each rank publishes a record of its process, its node and what its environment allows. All ranks read all records, so
all come to one conclusion. Ranks are on one node if their boot ids are equal, whatever the host names are;
`TRICOMM_NODE_ID` overrides that. Whether the ranks of a node can share memory shows when the kernels' communicator is
made.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from tricomm import env
from tricomm.errors import InvalidArgument, RendezvousError
from tricomm.kernels.launch import compiler, interpreter
from tricomm.store import process, records
from tricomm.store.deadline import Bounded
from tricomm.store.gather import Arrived, gather, missing, next_generation
from tricomm.store.records import Capabilities, Failure, Kind, Record, Said, said_of

_CPU_KERNELS, _CHECK, _CUDA_KERNELS, _CPU_POSSIBLE = 1, 2, 4, 8
_GRACE_SECONDS = 0.5
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class GroupConfig:
    """A group as it was asked for: this process's rank in it, its global `ranks`, its name, and a store of its own."""

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    ranks: list[int]
    name: str

    def __str__(self) -> str:
        return f"c10d group {self.name!r}, rank {self.rank} of {self.world_size}"


@dataclass(frozen=True)
class RankProcess:
    """The process of one rank, and its node."""

    node: bytes
    pid: int
    started: int
    namespace: int
    descriptors: int  # it could open so many more when the group was made

    def ended(self) -> bool:
        """True if this process sees that the other one has ended; False says nothing across hosts."""
        here = self.node == process.node_id() and self.namespace == process.pid_namespace()
        return here and not process.alive(self.pid, self.started)


@dataclass(frozen=True)
class GroupCapabilities:
    """The conclusion, equal on all ranks.

    `no_kernels` says by device type why there are none; `check` is TRICOMM_CHECK.
    """

    members: tuple[RankProcess, ...]
    nodes: int
    check: bool
    no_kernels: dict[str, str | None]


def exchange_capabilities(store: Any, rank: int, world_size: int, timeout: float) -> GroupCapabilities:
    """Exchange capabilities; every rank of the group calls it.

    Raises `RendezvousError` that names the ranks without a record after `timeout` seconds, or the rank with a wrong
    record and what is wrong with it. Under TRICOMM_TOKEN the ranks also confirm that all of them read the same
    records, which were written for this group and not before. So another writer to the store, without the token, can
    make the set-up of a group fail, and change nothing.
    """
    token, end, generation = env.token(), time.monotonic() + timeout, 0
    bounded = Bounded(store, timeout + _GRACE_SECONDS)
    try:
        generation = next_generation(bounded, f"tricomm/facts/{rank}")
        own = Record(rank, world_size, generation, secrets.token_bytes(records.NONCE_BYTES), _own_capabilities())
        said = _gather(bounded, own, token, "facts", timeout, end)
        if token is not None:
            _confirm(bounded, own, said, token, timeout, end)
    except BaseException as error:
        if generation:
            _publish_failure(bounded, rank, world_size, generation, token, error)
        raise
    finally:
        bounded.close()
    return _conclude([_body(record) for record in said])


def _publish_failure(
    store: Bounded, rank: int, world_size: int, generation: int, token: bytes | None, error: BaseException
) -> None:
    """Tell the other ranks why this one fails, so that none waits for it; only the first failure is told."""
    failure = Failure(os.getpid(), type(error).__name__, str(error))
    record = Record(rank, world_size, generation, bytes(records.NONCE_BYTES), failure)
    try:
        store.extend(_GRACE_SECONDS)
        if store.usable and not store.check(_failure_key(generation)):
            store.set(_failure_key(generation), record.pack(token))
    except RendezvousError:
        pass  # the store is gone; the caller's own error matters more


def _failure_key(generation: int) -> str:
    return f"tricomm/facts/failed/{generation}"


def _own_capabilities() -> Capabilities:
    switches = _CPU_KERNELS * cpu_through_kernels() | _CHECK * (env.text("TRICOMM_CHECK") != "0")
    switches |= _CUDA_KERNELS * (not env.peer_access_disabled() and compiler.refused() is None)
    switches |= _CPU_POSSIBLE * (interpreter.supported() is None)
    pid = os.getpid()
    left = process.descriptors_left()
    return Capabilities(pid, process.start_time(pid) or 0, process.pid_namespace(), process.node_id(), switches, left)


def cpu_through_kernels() -> bool:
    """TRICOMM_CPU: "kernels" or "gloo" (unset: gloo); raises `InvalidArgument` for anything else."""
    route = env.text("TRICOMM_CPU")
    if route not in (None, "kernels", "gloo"):
        raise InvalidArgument(f"TRICOMM_CPU={route!r}: kernels or gloo is needed")
    return route == "kernels"


def _gather(store: Bounded, mine: Record, token: bytes | None, what: str, timeout: float, end: float) -> list[Record]:
    this_rank = f"rank {mine.rank} of {mine.world_size}"

    def late(said: Arrived) -> RendezvousError:
        return RendezvousError(
            f"{this_rank}: timeout after {timeout:g} s: rank(s) {missing(said, mine.world_size)} did not come to make "
            "the group; do all of its ranks run, and make their groups in the same order?"
        )

    def check(record: Record) -> None:
        if record.world_size != mine.world_size:
            raise RendezvousError(
                f"rank {record.rank} says that the world size is {record.world_size}, {this_rank} says "
                f"{mine.world_size}: one store for one group"
            )

    next_look = time.monotonic() + _LOOK_SECONDS

    def look(said: Arrived) -> None:
        nonlocal next_look
        if time.monotonic() < next_look:
            return
        next_look = time.monotonic() + _LOOK_SECONDS
        if data := store.read(_failure_key(mine.generation)):
            record = records.parse(data, Kind.FAILURE, mine.generation, None, token)
            assert isinstance(failure := record.body, Failure), "parse gives the kind that it was asked for"
            raise RendezvousError(
                f"rank {record.rank} (pid {failure.pid}) gave the making of the group up: "
                f"{failure.kind}: {failure.text}"
            )

    return gather(store, mine, token, lambda rank: f"tricomm/{what}/{rank}/{mine.generation}", end, late, check, look)


def _confirm(store: Bounded, own: Record, said: list[Record], token: bytes, timeout: float, end: float) -> None:
    """Compare what the ranks have read. Each record has a nonce of its rank, so none can be an old one."""
    digest = hashlib.sha256(b"".join(record.pack(token) for record in said)).digest()
    mine = replace(own, body=Said(1, "c10d group", digest))
    for record in _gather(store, mine, token, "confirmed", timeout, end):
        if said_of(record) != mine.body:
            raise RendezvousError(
                f"rank {record.rank} read other records of this group than rank {own.rank}: an old record, or one "
                "that was exchanged; who else writes to this store?"
            )


def _body(record: Record) -> Capabilities:
    assert isinstance(record.body, Capabilities), "gather gives records of the kind that it was given"
    return record.body


def _conclude(said: list[Capabilities]) -> GroupCapabilities:
    members = tuple(RankProcess(one.node, one.pid, one.start_time, one.pid_namespace, one.descriptors) for one in said)
    common = ~0
    for one in said:
        common &= one.switches
    cpu: str | None = "CPU tensors go to Gloo unless TRICOMM_CPU=kernels on all ranks"
    if common & _CPU_KERNELS:
        cpu = None if common & _CPU_POSSIBLE else "the interpreter runs no kernels under some rank's Triton"
    cuda: str | None = "on some rank TRICOMM_P2P_DISABLE, NCCL_P2P_DISABLE or TRITON_INTERPRET is set"
    cuda = None if common & _CUDA_KERNELS else cuda
    nodes = len({member.node for member in members})
    return GroupCapabilities(members, nodes, bool(common & _CHECK), {"cpu": cpu, "cuda": cuda})


def torch_backend(device: str) -> str | None:
    """This torch's own backend for `device`: gloo, nccl or None."""
    if device == "cpu":
        return "gloo" if torch.distributed.is_gloo_available() else None
    return "nccl" if torch.distributed.is_nccl_available() else None
