"""What the ranks of a c10d group agree on when it is made, over the group's own store.

Each rank says who it is and what it was told by its environment; all read all of it, so all come to one conclusion.
Node membership is the boot id, never the host name; `TRICOMM_NODE_ID` overrides it. Whether the ranks of one node
really share memory shows when the kernels' communicator is made.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import Any

import torch

from tricomm import env
from tricomm.errors import InvalidArgument, RendezvousError
from tricomm.kernels import interpreter
from tricomm.store import process
from tricomm.store.deadline import Bounded

_MAGIC, _VERSION = b"TCFA", 2
# magic, version, flags, node, pid, start time, rank, world, pid namespace, descriptors left
_RECORD = struct.Struct("<4sHH16sQQIIQq")
_CPU_KERNELS, _CHECK, _CUDA_KERNELS, _CPU_POSSIBLE = 1, 2, 4, 8
_WAIT = 0.005


@dataclass(frozen=True)
class Member:
    """One rank's process: where it lives, and how to see whether it still does."""

    node: bytes
    pid: int
    started: int
    namespace: int
    descriptors: int  # that it had left when the group was made

    def ended(self) -> bool:
        """True where this process can see that the other one is gone; False says nothing across hosts."""
        here = self.node == process.node_id() and self.namespace == process.pid_namespace()
        return here and not process.alive(self.pid, self.started)


@dataclass(frozen=True)
class Facts:
    """The conclusion, equal on all ranks. `no_kernels` says by device why there are none; `check` is TRICOMM_CHECK."""

    members: tuple[Member, ...]
    nodes: int
    check: bool
    no_kernels: dict[str, str | None]


def agree(store: Any, rank: int, world_size: int, timeout: float) -> Facts:
    """Exchange facts; every rank of the group calls it. `RendezvousError` names who did not come in `timeout` s."""
    bounded = Bounded(store, timeout + 0.5)
    try:
        generation = bounded.add(f"tricomm/facts/{rank}", 1)
        bounded.set(f"tricomm/facts/{rank}/{generation}", _mine(rank, world_size))
        records = _collect(bounded, rank, world_size, generation, timeout)
    finally:
        bounded.close()
    return _conclude([_parse(record, r, world_size) for r, record in enumerate(records)])


def _mine(rank: int, world_size: int) -> bytes:
    flags = _CPU_KERNELS * cpu_through_kernels() | _CHECK * (env.text("TRICOMM_CHECK") != "0")
    flags |= _CUDA_KERNELS * (not env.peer_access_disabled())
    flags |= _CPU_POSSIBLE * (interpreter.supported() is None)
    pid = os.getpid()
    where = (process.start_time(pid) or 0, rank, world_size, process.pid_namespace())
    return _RECORD.pack(_MAGIC, _VERSION, flags, process.node_id(), pid, *where, process.descriptors_left())


def cpu_through_kernels() -> bool:
    """TRICOMM_CPU: "kernels" or "gloo" (unset: gloo); raises `InvalidArgument` for anything else."""
    found = env.text("TRICOMM_CPU")
    if found not in (None, "kernels", "gloo"):
        raise InvalidArgument(f"TRICOMM_CPU={found!r}: kernels or gloo is needed")
    return found == "kernels"


def _collect(store: Bounded, rank: int, world_size: int, generation: int, timeout: float) -> list[bytes]:
    records: dict[int, bytes] = {}
    end = time.monotonic() + timeout
    wait = _WAIT
    while len(records) < world_size:
        for other in range(world_size):
            if other not in records:
                data = store.read(f"tricomm/facts/{other}/{generation}")
                if data is None:
                    break
                records[other] = data
        else:
            break
        if time.monotonic() > end:
            missing = [r for r in range(world_size) if r not in records]
            raise RendezvousError(
                f"rank {rank} of {world_size}: within {timeout:g} s rank(s) {missing} did not come to make the group; "
                "do all of its ranks run, and make their groups in the same order?"
            )
        time.sleep(wait)
        wait = min(2 * wait, 0.1)
    return [records[r] for r in range(world_size)]


def _parse(data: bytes, rank: int, world_size: int) -> tuple[int, Member]:
    if len(data) != _RECORD.size:
        raise RendezvousError(f"rank {rank} wrote {len(data)} bytes of facts, {_RECORD.size} are needed: same tricomm?")
    magic, version, flags, node, pid, started, theirs, world, namespace, left = _RECORD.unpack(data)
    if (magic, version, theirs, world) != (_MAGIC, _VERSION, rank, world_size):
        raise RendezvousError(
            f"rank {rank}'s facts say version {version}, rank {theirs} of {world}; expected version {_VERSION}, "
            f"rank {rank} of {world_size}: use the same tricomm, and one store for one group"
        )
    return flags, Member(node, pid, started, namespace, left)


def _conclude(said: list[tuple[int, Member]]) -> Facts:
    members = tuple(member for _, member in said)
    everybody = ~0
    for flags, _ in said:
        everybody &= flags
    cpu: str | None = "CPU tensors go to Gloo unless TRICOMM_CPU=kernels on all ranks"
    if everybody & _CPU_KERNELS:
        cpu = None if everybody & _CPU_POSSIBLE else "the interpreter runs no kernels under some rank's Triton"
    cuda = None if everybody & _CUDA_KERNELS else "peer access is disabled by TRICOMM_P2P_DISABLE or NCCL_P2P_DISABLE"
    nodes = len({member.node for member in members})
    return Facts(members, nodes, bool(everybody & _CHECK), {"cpu": cpu, "cuda": cuda})


def torch_backend(device: str) -> str | None:
    """Who serves `device` natively in this torch: gloo, nccl, or nobody."""
    if device == "cpu":
        return "gloo" if torch.distributed.is_gloo_available() else None
    return "nccl" if torch.distributed.is_nccl_available() else None
