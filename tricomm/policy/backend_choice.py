"""The backend of a call: this library's kernels, NCCL, or messages over TCP (`gloo`).

The choice is a pure function of facts that are equal on all ranks: facts on which they agreed when the group was made
(`GroupFacts`), and arguments that must be equal (collective, dtype, op, bytes). It does not depend on facts of one rank
(its tensor's address, its splits of an all_to_all, its peer), so all ranks make the same choice. A group's `Router`
decides each kind of call once, and logs it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tricomm import arguments, env
from tricomm.errors import InvalidArgument
from tricomm.kernels import multimem
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import reduction
from tricomm.metrics.counters import KERNELS, NCCL
from tricomm.policy.tuning_tables import read_table

POINT_TO_POINT = frozenset({"send", "recv"})
REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})


@dataclass(frozen=True)
class GroupFacts:
    """The facts that a group's ranks agreed on: the same value on every rank.

    device      "cpu" or "cuda": the device of the call's tensors
    world_size  ranks of the group
    nodes       number of hosts on which they are
    no_kernels  why this group has no kernels, or None
    fallback    the backend for calls that the kernels do not support: "nccl", "gloo", or None
    missing     why there is no fallback, if there is none
    reachable   whether every rank maps every other rank's memory; if not, only kernels of a cube mesh can run
    batch_invariant    whether reductions must be batch-invariant
    switch      whether calls may use NVLS (`kernels/multimem.py`), and no computation overlaps them
    wire        how long sums are quantised on the links (the kernels then run all sizes); empty: they are not
    most_bytes  the largest input that the kernels run; None: `tables/nccl_threshold.json` says
    """

    device: str
    world_size: int
    nodes: int
    no_kernels: str | None
    fallback: str | None
    missing: str = "this torch has no backend for it"
    reachable: bool = True
    batch_invariant: bool = False
    switch: bool = False
    wire: str = ""
    most_bytes: int | None = None

    @property
    def no_memory(self) -> str | None:
        """Why the group as a whole shares no memory, or None."""
        return f"the group spans {self.nodes} nodes" if self.nodes > 1 else self.no_kernels


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a call (`kernels`, `nccl` or `gloo`), and the reason."""

    backend: str
    reason: str


def decide(
    facts: GroupFacts, collective: str, dtype: torch.dtype | None, op: str, nbytes: int | None, forced: bool = False
) -> BackendChoice:
    """The backend of one call. `nbytes` is the input of one rank; None if it may differ between ranks.

    `forced`: the caller has named a kernel. Raises `InvalidArgument` if no backend can run the call, or none that a
    batch-invariant group may use.
    """
    reason = _why_not_kernels(facts, collective, dtype, op)
    if reason is not None and forced:
        raise InvalidArgument(
            f"{collective}: a kernel is forced, and none can run this: {reason}; leave the choice open"
        )
    if reason is not None and facts.fallback is None:
        other = f"; nor is there another backend for it on {facts.device}: {facts.missing}"
        raise InvalidArgument(f"{collective}: {reason}{other if reason != _undefined(collective, dtype, op) else ''}")
    if facts.batch_invariant:
        return _in_rank_order(facts, reason, collective, dtype, op)
    limit = threshold_of(facts, collective, dtype, op)
    if reason is None and not forced and limit is not None and nbytes is not None and nbytes > limit:
        reason = f"{nbytes} bytes are over the {'NCCL threshold' if facts.most_bytes is None else 'limit'} of {limit}"
    if reason is None:
        return BackendChoice(KERNELS, "the kernels cover it")
    if facts.fallback is None:
        return BackendChoice(KERNELS, f"{reason}, but {facts.missing}")
    return BackendChoice(facts.fallback, reason)


def _in_rank_order(
    facts: GroupFacts, reason: str | None, collective: str, dtype: torch.dtype | None, op: str
) -> BackendChoice:
    """The backend of a call of a batch-invariant group. `reason`: why no kernel runs it, or None.

    It does not depend on the size: the kernels run any size, while NCCL chooses its order of summation by size, ranks
    and links. On the CPU data is sent in messages, and `c10d/dtype_emulation.py` reduces each element in rank order.
    """
    if reason is None:
        return BackendChoice(KERNELS, "the kernels cover it, in rank order and at any size: batch-invariant")
    assert facts.fallback is not None, "without another backend the call has been refused"
    if op == "none":
        return BackendChoice(facts.fallback, f"{reason}; batch-invariant: nothing is reduced")
    kind = "" if dtype is None else f" of {str(dtype).removeprefix('torch.')}"
    what = f"{collective}: {op}{kind} is refused in a batch-invariant group"
    without = "or make the group without batch_invariant (TRICOMM_BATCH_INVARIANT)"
    if facts.fallback == NCCL:
        raise InvalidArgument(
            f"{what}: {reason}, and the order in which NCCL reduces depends on the size; "
            f"{_remedy(facts, collective)}, {without}"
        )
    if collective == "all_reduce_sparse":
        raise InvalidArgument(f"{what}: the sum of sparse tensors has no fixed order; pass x.to_dense(), {without}")
    if op == "prod" and dtype is not None and dtype.is_complex:
        # Measured: torch's vectorised product and its scalar loop over the last elements round differently.
        raise InvalidArgument(
            f"{what}: how a complex product rounds depends on its place in the tensor; multiply the results of an "
            f"all_gather, {without}"
        )
    return BackendChoice(facts.fallback, f"{reason}; batch-invariant: messages, reduced here in rank order")


def _remedy(facts: GroupFacts, collective: str) -> str:
    """The change that lets the kernels run a reduction."""
    if facts.nodes > 1:
        return "reduce in groups inside a node"
    if facts.no_kernels is not None or not facts.reachable:
        return "run it where every rank's GPU reaches every other's memory"
    if collective == "reduce_scatter_v":
        return "pad the parts to one size"
    return "convert the tensor, or use an operation that the kernels have"


def _why_not_kernels(facts: GroupFacts, collective: str, dtype: torch.dtype | None, op: str) -> str | None:
    if collective in POINT_TO_POINT:
        # All ranks together set up the kernels' memory, but only two ranks make this call.
        return "point to point: only two ranks call"
    if facts.no_memory is not None:
        return facts.no_memory
    if collective not in COLLECTIVES:
        return f"there is no {collective} kernel"
    cube = [k for k in registry.of(collective, facts.world_size) if k.needs_cube]
    if facts.batch_invariant:
        cube = [k for k in cube if k.rank_order]
    if not facts.reachable and not cube:
        return "not every rank reaches every other one's memory, and no kernel avoids that"
    if dtype is not None and dtype not in arguments.DTYPES:
        return f"no kernel takes {dtype}; there is {', '.join(d.name for d in arguments.DTYPES.values())}"
    return _undefined(collective, dtype, op)


def _undefined(collective: str, dtype: torch.dtype | None, op: str) -> str | None:
    """The reason why `dtype` has no operation `op`, or None."""
    kind = arguments.DTYPES.get(dtype) if dtype is not None and collective in REDUCTIONS else None
    if kind is None or op in kind.ops:
        return None
    return f"op {op!r} is not defined for {kind.name}; there is {', '.join(kind.ops)}"


def threshold_of(facts: GroupFacts, collective: str, dtype: torch.dtype | None, op: str) -> int | None:
    """Bytes of one rank's input above which NCCL is faster; None: never."""
    if facts.most_bytes is not None:
        return facts.most_bytes
    kind = arguments.DTYPES.get(dtype) if dtype is not None else None
    defined = reduction(kind, op) if kind is not None and op in kind.ops else None
    if facts.wire and collective == "all_reduce" and defined and registry.why_not_wire(*defined) is None:
        return None
    adds = defined is not None and multimem.why_not_reduced(*defined) is None
    device = "switch" if facts.switch and facts.device == "cuda" and adds else facts.device
    return nccl_threshold(device, collective, facts.world_size)


def nccl_threshold(device: str, collective: str, world_size: int) -> int | None:
    """`threshold_of` from `tables/nccl_threshold.json`. `device`: cpu, cuda, or switch for calls that NVLS can
    reduce."""
    for row in limits():
        if row["device"] == device and row["collective"] in (collective, "any") and world_size <= row["world_size"]:
            limit: int | None = row["max_bytes"]
            return limit
    return None


@cache
def limits() -> list[dict[str, Any]]:
    """The rows of `tables/nccl_threshold.json`. Raises `ResourceError` if it cannot be read."""
    rows: list[dict[str, Any]] = json.loads(read_table("nccl_threshold"))["rows"]
    return rows


_MOST_ROUTES = 4096


class Router:
    """Routes the calls of the group `name`, of which this process is `rank`.

    A `torch.distributed` group and a group of an inference engine share their router with the communicator of their
    kernels. `fallback` renames the fallback in routes. `alone`: no computation runs during the calls, so that the
    larger threshold of NVLS applies.
    """

    def __init__(
        self, facts: GroupFacts, name: str, rank: int, fallback: str | None = None, alone: bool = True
    ) -> None:
        self._facts, self._name, self._fallback, self.alone = facts, name, fallback, alone
        self._logs = env.logs_routing() and rank == 0
        self._logged: set[tuple[Any, ...]] = set()
        self._routes: dict[tuple[Any, ...], BackendChoice] = {}

    @property
    def facts(self) -> GroupFacts:
        """The facts on which the ranks agreed. Setting them drops all routes."""
        return self._facts

    @facts.setter
    def facts(self, facts: GroupFacts) -> None:
        self._facts = facts
        self._routes.clear()

    def choice(
        self, collective: str, dtype: torch.dtype | None, op: str, nbytes: int | None, forced: bool = False
    ) -> BackendChoice:
        """As `decide` with the group's facts, without a log entry."""
        key = collective, dtype, op, nbytes, forced
        route = self._routes.get(key)
        if route is None:
            route = decide(self._facts, *key)
            if self._fallback is not None and route.backend == self._facts.fallback:
                route = BackendChoice(self._fallback, route.reason)
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            self._routes[key] = route
        return route

    def route(
        self,
        collective: str,
        dtype: torch.dtype | None,
        op: str,
        nbytes: int | None,
        forced: bool = False,
        name: str | None = None,
    ) -> BackendChoice:
        """The backend of a call that is made now. It is logged; for the kernels only once the kernel is known
        (`log`)."""
        route = self.choice(collective, dtype, op, nbytes, forced)
        if route.backend != KERNELS:
            self.log(route, (collective, dtype, op, nbytes), name)
        return route

    def log(
        self, route: BackendChoice, call: tuple[str, torch.dtype | None, str, int | None], name: str | None = None
    ) -> None:
        """With TRICOMM_LOG=routing rank 0 prints each distinct route; `name`, if given, replaces the collective's
        name."""
        if not self._logs or (route, call, name) in self._logged:
            return
        self._logged.add((route, call, name))
        collective, dtype, op, nbytes = call
        size = "" if nbytes is None else f" {nbytes} B"
        what = f"{collective} {op}" if collective in REDUCTIONS and not name else name or collective
        kind = "" if dtype is None else f" {str(dtype).removeprefix('torch.')}"
        print(f"tricomm routing: {self._name}: {what}{kind}{size} -> {route.backend}: {route.reason}", flush=True)
