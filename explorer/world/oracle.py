"""Checks the results of collectives: they must be the inputs, reduced in the documented order, and have the same bits
on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from tricomm.core import topology_agreement
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.explorer.report.findings import Finding
from tricomm.kernels import reference
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch.kernel_launch import Rows
from tricomm.topology.model import Topology

_NOT_SHOWN = ("barrier", "all_to_all_v")
_ONE_ORDER, _LAST_WRITE = "all ranks must reduce in one order", "look at the last write to that element"
_FEWER = ("broadcast", "scatter")  # collectives of which only the root's input counts


@dataclass
class ObservedCall:
    """One call of a collective: the input and the output of each rank."""

    collective: str
    op: str
    root: int
    quads: Sequence[Sequence[int]] = ()  # the quads, if the collective runs over a hybrid cube mesh
    wire: str = ""  # the quantisation on the links, if any
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)


class Oracle:
    """Collects the calls of one execution, and checks their results."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._calls: dict[int, ObservedCall] = {}  # by number of the call

    def watched(
        self,
        request: Request,
        plan: LaunchPlan,
        rank: int,
        topology: Topology | None,
        aborted: Callable[[], bool],
        in_order: Callable[[Callable[[], None]], None] = lambda look: look(),
    ) -> LaunchPlan:
        """A copy of `plan` that shows this oracle each call that `rank` makes by it. After a call, `aborted` tells if
        its output is undefined. `in_order(look)` calls `look` when all earlier launches have run."""
        choice = plan.choice
        # A replay has its capture's call number; a fused kernel's output is not the sum alone.
        if request.collective in _NOT_SHOWN or plan.mode == "graph" or choice.fused:
            return plan
        kernel = registry.find(request.collective, choice.algorithm, choice.protocol, choice.zero_copy)
        by_quads = quads(topology, self._world_size) if kernel.needs_cube else ()

        def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: Rows = ()) -> None:
            made = ObservedCall(request.collective, request.op or "none", request.root, by_quads, kernel.wire)
            shown = self._calls.setdefault(call >> 32, made)
            gets = request.root < 0 or request.collective in _FEWER or request.root == rank

            def before() -> None:
                shown.inputs[rank] = x.detach().reshape(-1).clone()

            def after() -> None:
                if gets and not aborted():
                    shown.outputs[rank] = y.detach().reshape(-1).clone()

            in_order(before)
            plan.run(x, y, count, call, rows)
            in_order(after)

        return replace(plan, run=run)

    def findings(self) -> list[Finding]:
        """The wrong results, on ranks that have ended a call, of calls that all ranks have begun."""
        wrong = []
        for sequence, call in sorted(self._calls.items()):
            if len(call.inputs) < self._world_size or not call.outputs:
                continue
            name = f"{call.collective}, sequence {sequence}"
            one, first = next(iter(call.outputs.items()))
            alike = call.collective in ("all_reduce", "all_gather", "broadcast")
            apart = next(((r, y) for r, y in call.outputs.items() if not same_bits(y, first)), None)
            if apart is not None and alike:
                text = f"{name}: ranks {one} and {apart[0]} hold different bits; {difference(first, apart[1])}"
                advice = _ONE_ORDER if call.collective == "all_reduce" else _LAST_WRITE
                wrong.append(Finding("rank_mismatch", (one, apart[0]), (), text, advice))
            parts = [call.inputs[r] for r in range(self._world_size)]
            for rank, y in sorted(call.outputs.items()):
                exact = reference.expected(call.collective, call.op, parts, rank, call.root, call.quads, call.wire)
                if not same_values(y, exact):
                    text = f"{name}: rank {rank}'s result is wrong; {difference(exact, y)}"
                    wrong.append(Finding("wrong_result", (rank,), (), text, _LAST_WRITE))
                    break
        return wrong


def quads(topology: Topology | None, world_size: int) -> list[tuple[int, ...]]:
    """The ranks of each quad of a hybrid cube mesh, in ascending order."""
    return list(dict.fromkeys(place.order for place in topology_agreement.places(topology, world_size) or ()))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if all bits are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if all numbers are equal. A NaN equals a NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """A description of the difference between two results."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    a, b = a.reshape(-1), b.reshape(-1)
    apart = torch.nonzero(
        a.view(torch.uint8).reshape(a.numel(), -1).ne(b.view(torch.uint8).reshape(a.numel(), -1)).any(1)
    )
    at = int(apart[0])
    return f"{len(apart)} of {a.numel()} elements differ, the first is {at}: {a[at].item()} and {b[at].item()}"


def mismatched(results: dict[int, list[torch.Tensor]], identical: bool | None) -> list[Finding]:
    """The ranks' results that differ from the first rank's. `identical=None`: only results that are equal except for
    rounding are expected to be identical, because others may be meant to differ between ranks."""
    if identical is False or not results:
        return []
    first, *others = results.items()
    for rank, theirs in others:
        if len(theirs) != len(first[1]):
            continue
        for a, b in zip(first[1], theirs, strict=True):
            if not same_bits(a, b) and (identical or _close(a, b)):
                text = f"ranks {first[0]} and {rank} return different bits; {difference(a, b)}"
                return [Finding("rank_mismatch", (first[0], rank), (), text, _ONE_ORDER)]
    return []


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or not a.dtype.is_floating_point:
        return False
    relative = 16 * torch.finfo(a.dtype).eps
    return torch.allclose(a.double(), b.double(), rtol=relative, atol=relative * float(a.abs().max()), equal_nan=True)
