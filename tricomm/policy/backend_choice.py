"""The backend of a call: this library's kernels, NCCL, or Gloo.

The choice is pure, and made of facts that all ranks share: those that the ranks agreed on when the group was made
(`GroupFacts`) and those that have to be equal on all ranks (collective, dtype, op, bytes). Facts of one rank alone (its
tensor's address, its splits of an all_to_all, its peer) take no part, so all ranks choose alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from tricomm import arguments, env
from tricomm.errors import InvalidArgument
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.metrics.counters import KERNELS

POINT_TO_POINT = frozenset({"send", "recv"})
REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})

_printed: set[tuple[Any, ...]] = set()


@dataclass(frozen=True)
class GroupFacts:
    """The facts that a group's ranks agreed on: the same value on every rank.

    device      "cpu" or "cuda": the device of the call's tensors
    world_size  ranks of the group
    nodes       number of hosts that they are on
    no_kernels  why this group has no kernels, or None
    fallback    the backend for calls that the kernels do not cover: "nccl", "gloo", or None
    missing     why there is no fallback, if there is none
    reachable   whether every rank's memory is mapped on every other; if not, only a cube mesh's kernels can run
    """

    device: str
    world_size: int
    nodes: int
    no_kernels: str | None
    fallback: str | None
    missing: str = "this torch has no backend for it"
    reachable: bool = True


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a call (`kernels`, `nccl` or `gloo`), and the reason."""

    backend: str
    reason: str


@cache
def decide(
    facts: GroupFacts, collective: str, dtype: torch.dtype | None, op: str, nbytes: int | None, forced: bool = False
) -> BackendChoice:
    """The backend of one call. `nbytes` is the input of one rank; None if ranks may differ in it.

    `forced`: the caller has named a kernel. Raises `InvalidArgument` if no backend can run the call.
    """
    reason = _why_not_kernels(facts, collective, dtype, op)
    if reason is not None and forced:
        raise InvalidArgument(
            f"{collective}: a kernel is forced, and none can run this: {reason}; leave the choice open"
        )
    if reason is not None and facts.fallback is None:
        raise InvalidArgument(
            f"{collective}: {reason}; nor is there another backend for it on {facts.device}: {facts.missing}"
        )
    limit = nccl_threshold(facts.device, collective, facts.world_size)
    if reason is None and not forced and limit is not None and nbytes is not None and nbytes > limit:
        reason = f"{nbytes} bytes are over the NCCL threshold of {limit}"
    if reason is None:
        return BackendChoice(KERNELS, "the kernels cover it")
    if facts.fallback is None:
        return BackendChoice(KERNELS, f"{reason}, but {facts.missing}")
    return BackendChoice(facts.fallback, reason)


def _why_not_kernels(facts: GroupFacts, collective: str, dtype: torch.dtype | None, op: str) -> str | None:
    if collective in POINT_TO_POINT:
        # The kernels' memory is set up by all ranks together, but only two ranks make this call.
        return "point to point: only two ranks call"
    if facts.nodes > 1:
        # The hierarchical form belongs here: kernels over the ranks of each node, the fallback between the nodes.
        return f"the group spans {facts.nodes} nodes"
    if facts.no_kernels is not None:
        return facts.no_kernels
    if collective not in COLLECTIVES:
        return f"there is no {collective} kernel"
    if not facts.reachable and not any(k.needs_cube for k in registry.of(collective, facts.world_size)):
        return "not every rank reaches every other one's memory, and no kernel avoids that"
    if dtype is not None and dtype not in arguments.DTYPES:
        return f"no kernel takes {dtype}; there is {', '.join(d.name for d in arguments.DTYPES.values())}"
    if collective in REDUCTIONS and dtype is not None and op not in arguments.DTYPES[dtype].ops:
        kind = arguments.DTYPES[dtype]
        return f"op {op!r} is not defined for {kind.name}; there is {', '.join(kind.ops)}"
    return None


def nccl_threshold(device: str, collective: str, world_size: int) -> int | None:
    """Bytes of one rank's input above which NCCL is faster (`tables/nccl_threshold.json`); None: never."""
    for row in _limits():
        if row["device"] == device and row["collective"] in (collective, "any") and world_size <= row["world_size"]:
            limit: int | None = row["max_bytes"]
            return limit
    return None


@cache
def _limits() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(files("tricomm").joinpath("tables/nccl_threshold.json").read_text())["rows"]
    return rows


def log_once(
    choice: BackendChoice,
    group: str,
    rank: int,
    collective: str,
    dtype: torch.dtype | None,
    op: str,
    nbytes: int | None,
) -> None:
    """With TRICOMM_LOG=routing print a call, the first time that it is made in this group, on rank 0 only."""
    if rank == 0 and "routing" in (env.text("TRICOMM_LOG") or ""):
        key = (group, collective, dtype, op, nbytes, choice)
        if key not in _printed:
            _printed.add(key)
            size = "" if nbytes is None else f" {nbytes} B"
            what = f"{collective} {op}" if collective in REDUCTIONS else collective
            kind = "" if dtype is None else f" {str(dtype).removeprefix('torch.')}"
            print(f"tricomm routing: {group}: {what}{kind}{size} -> {choice.backend}: {choice.reason}", flush=True)
