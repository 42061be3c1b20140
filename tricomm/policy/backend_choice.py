"""Where a call goes: this library's kernels, NCCL, or Gloo.

The decision is pure, and made of facts that all ranks share: what the ranks agreed on when the group was made
(`Site`) and what has to be equal on all ranks (collective, dtype, op, bytes). What one rank alone knows (its tensor's
address, its splits of an all_to_all, who it sends to) takes no part, so no rank ever goes alone.
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
from tricomm.metrics.counters import GLOO, KERNELS, NCCL

__all__ = ["GLOO", "KERNELS", "NCCL", "POINT_TO_POINT", "Route", "Site", "decide", "hand_over", "print_once"]

POINT_TO_POINT = frozenset({"send", "recv"})
REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})

_printed: set[tuple[Any, ...]] = set()


@dataclass(frozen=True)
class Site:
    """What a group's ranks agreed on: the same value on every rank.

    device      "cpu" or "cuda": where the tensors of the call are
    world_size  ranks of the group
    nodes       how many hosts they live on
    no_kernels  why this group has no kernels, where it has none
    native      who serves what the kernels do not: "nccl", "gloo", or None
    missing     why there is nobody, where there is nobody
    reachable   whether every rank's memory is mapped on every other; where not, only a cube mesh's kernels go around
    """

    device: str
    world_size: int
    nodes: int
    no_kernels: str | None
    native: str | None
    missing: str = "this torch has no native backend for it"
    reachable: bool = True


@dataclass(frozen=True)
class Route:
    """Who runs a call (`kernels`, `nccl` or `gloo`), and why."""

    path: str
    reason: str


@cache
def decide(
    site: Site, collective: str, dtype: torch.dtype | None, op: str, nbytes: int | None, forced: bool = False
) -> Route:
    """The route of one call. `nbytes` is the input of one rank; None where ranks may differ in it.

    `forced`: the caller has named a kernel. Raises `InvalidArgument` where nobody can run the call.
    """
    reason = _why_not_kernels(site, collective, dtype, op)
    if reason is not None and forced:
        raise InvalidArgument(
            f"{collective}: a kernel is forced, and none can run this: {reason}; leave the choice open"
        )
    if reason is not None and site.native is None:
        raise InvalidArgument(
            f"{collective}: {reason}; nor does anybody behind the kernels take it on {site.device}: {site.missing}"
        )
    limit = hand_over(site.device, collective, site.world_size)
    if reason is None and not forced and limit is not None and nbytes is not None and nbytes > limit:
        reason = f"{nbytes} bytes are over the hand-over limit of {limit}"
    if reason is None:
        return Route(KERNELS, "the kernels cover it")
    if site.native is None:
        return Route(KERNELS, f"{reason}, but {site.missing}")
    return Route(site.native, reason)


def _why_not_kernels(site: Site, collective: str, dtype: torch.dtype | None, op: str) -> str | None:
    if collective in POINT_TO_POINT:
        # The kernels' memory is set up by all ranks together, and here two may be the only ones that come.
        return "point to point: only two ranks call"
    if site.nodes > 1:
        # The hierarchical form belongs here: kernels over the ranks of each node, `native` between the nodes.
        return f"the group spans {site.nodes} nodes"
    if site.no_kernels is not None:
        return site.no_kernels
    if collective not in COLLECTIVES:
        return f"there is no {collective} kernel"
    if not site.reachable and not any(k.needs_cube for k in registry.of(collective, site.world_size)):
        return "not every rank reaches every other one's memory, and no kernel goes around that"
    if dtype is not None and dtype not in arguments.DTYPES:
        return f"no kernel takes {dtype}; there is {', '.join(d.name for d in arguments.DTYPES.values())}"
    if collective in REDUCTIONS and dtype is not None and op not in arguments.DTYPES[dtype].ops:
        kind = arguments.DTYPES[dtype]
        return f"op {op!r} is not defined for {kind.name}; there is {', '.join(kind.ops)}"
    return None


def hand_over(device: str, collective: str, world_size: int) -> int | None:
    """Bytes of one rank's input above which NCCL is faster (`tables/hand_over.json`); None: never."""
    for row in _limits():
        if row["device"] == device and row["collective"] in (collective, "any") and world_size <= row["world_size"]:
            limit: int | None = row["max_bytes"]
            return limit
    return None


@cache
def _limits() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(files("tricomm").joinpath("tables/hand_over.json").read_text())["rows"]
    return rows


def print_once(
    route: Route, group: str, rank: int, collective: str, dtype: torch.dtype | None, op: str, nbytes: int | None
) -> None:
    """With TRICOMM_LOG=routing print a call, the first time it is made in this group and on rank 0 only."""
    if rank == 0 and "routing" in (env.text("TRICOMM_LOG") or ""):
        key = (group, collective, dtype, op, nbytes, route)
        if key not in _printed:
            _printed.add(key)
            size = "" if nbytes is None else f" {nbytes} B"
            what = f"{collective} {op}" if collective in REDUCTIONS else collective
            kind = "" if dtype is None else f" {str(dtype).removeprefix('torch.')}"
            print(f"tricomm routing: {group}: {what}{kind}{size} -> {route.path}: {route.reason}", flush=True)
