"""What the collectives must give: all ranks' inputs, reduced in the promised order, and the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tricomm.communicator import Communicator
from tricomm.core import topology_agreement
from tricomm.explorer.report.findings import Finding
from tricomm.kernels import reference
from tricomm.kernels.collectives import registry

_FEWER = ("broadcast", "scatter")  # only the root's input counts


@dataclass
class Call:
    """One collective: what each rank brought, and what each rank has."""

    collective: str
    op: str
    root: int
    quads: Sequence[Sequence[int]] = ()  # where it is over a hybrid cube mesh
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)


class Oracle:
    """Collects the calls of one execution."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._calls: dict[int, Call] = {}

    def communicator(self) -> type[Communicator]:
        """A communicator that shows every call to this oracle, and is as any other otherwise."""
        oracle = self

        class Shown(Communicator):
            def _run(
                self, collective: str, op: str, x: Any, y: Any, count: int, algorithm: Any, protocol: Any,
                root: int = -1, symmetric: Any = None,
            ) -> None:  # fmt: skip
                if not count:
                    return super()._run(collective, op, x, y, count, algorithm, protocol, root, symmetric)
                call = oracle._calls.setdefault(self._sequence + 1, Call(collective, op, root))
                call.inputs[self.rank] = x.detach().reshape(-1).clone()
                super()._run(collective, op, x, y, count, algorithm, protocol, root, symmetric)
                if root < 0 or collective in _FEWER or root == self.rank:
                    call.outputs[self.rank] = y.detach().reshape(-1).clone()

            def _launch(self, chosen: Any, x: Any, y: Any, rows: Any = ()) -> None:
                call, choice = oracle._calls.get(self._sequence + 1), chosen.choice
                if call is not None and registry.find(choice.collective, choice.algorithm, choice.protocol).needs_cube:
                    call.quads = quads(self)
                super()._launch(chosen, x, y, rows)

        return Shown

    def findings(self) -> list[Finding]:
        """What is wrong with the calls that all ranks have begun, on those that have ended them."""
        found = []
        for sequence, call in sorted(self._calls.items()):
            if len(call.inputs) < self._world_size or not call.outputs:
                continue
            name = f"{call.collective}, sequence {sequence}"
            one, first = next(iter(call.outputs.items()))
            alike = call.collective in ("all_reduce", "all_gather", "broadcast")
            apart = next(((r, y) for r, y in call.outputs.items() if not same_bits(y, first)), None)
            if apart is not None and alike:
                text = f"{name}: ranks {one} and {apart[0]} hold different bits; {difference(first, apart[1])}"
                found.append(Finding("rank_mismatch", (one, apart[0]), (), text, "all ranks must reduce in one order"))
            parts = [call.inputs[r] for r in range(self._world_size)]
            for rank, y in sorted(call.outputs.items()):
                exact = reference.expected(call.collective, call.op, parts, rank, call.root, call.quads)
                if not same_values(y, exact):
                    text = f"{name}: rank {rank}'s result is wrong; {difference(exact, y)}"
                    found.append(Finding("wrong_result", (rank,), (), text, "look at who wrote that element last"))
                    break
        return found


def quads(comm: Communicator) -> list[tuple[int, ...]]:
    """The ranks of each quad of a hybrid cube mesh, in ascending order."""
    return list(dict.fromkeys(place.order for place in topology_agreement.places(comm.topology, comm.world_size) or ()))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal as numbers; a NaN equals a NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Where two results part, for people."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    a, b = a.reshape(-1), b.reshape(-1)
    apart = torch.nonzero(
        a.view(torch.uint8).reshape(a.numel(), -1).ne(b.view(torch.uint8).reshape(a.numel(), -1)).any(1)
    )
    at = int(apart[0])
    return f"{len(apart)} of {a.numel()} elements differ, the first is {at}: {a[at].item()} and {b[at].item()}"


def mismatched(results: dict[int, list[torch.Tensor]], identical: bool | None) -> list[Finding]:
    """What ranks returned, against the first of them. `identical=None`: only what is equal but for rounding is held
    to be meant equal; what differs altogether may well be each rank's own."""
    if identical is False or not results:
        return []
    first, *others = results.items()
    for rank, theirs in others:
        if len(theirs) != len(first[1]):
            continue
        for a, b in zip(first[1], theirs, strict=True):
            if not same_bits(a, b) and (identical or _close(a, b)):
                text = f"ranks {first[0]} and {rank} return different bits; {difference(a, b)}"
                return [Finding("rank_mismatch", (first[0], rank), (), text, "all ranks must reduce in one order")]
    return []


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or not a.dtype.is_floating_point:
        return False
    relative = 16 * torch.finfo(a.dtype).eps
    return torch.allclose(a.double(), b.double(), rtol=relative, atol=relative * float(a.abs().max()), equal_nan=True)
