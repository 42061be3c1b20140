"""An all_reduce in two levels, over collaborators that know nothing of each other.

    shards      x  --reduce_scatter inside-->  shard  --all_reduce across-->  shard  --all_gather inside-->  y
    leaders     x  --reduce inside--> first rank of the part  --all_reduce across-->  --broadcast inside-->  y

n bytes of input per rank, P parts of R ranks. Inside, shards move as much as one level of R ranks does; across, each
rank's own link carries 2 (P-1)/P n/R. Leaders carry 2 (P-1)/P n over one link of each part.

Every rank gets the same bits: a shard (or the leaders' result) is reduced once, by a call that gives all its ranks the
same, and is only copied after that. Inside a part the order of summation is that of the ranks; across, Gloo's values
are summed in ascending order, and NCCL has its own. Types narrower than 32 bits are rounded once inside and again
across.

The steps of a call are ordered by the stream; the kernels' own mailboxes protect each step, and the shard is the
caller's memory or a copy of it, so no buffer is shared between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tricomm.core import launch_plan
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.core.launcher import LEAVE_SECONDS, Launcher
from tricomm.core.levels.across import Across, ConnectionLost, Runs
from tricomm.core.levels.bridge import Bridge
from tricomm.core.monitor import Monitor
from tricomm.core.watcher import WATCHER
from tricomm.errors import InvalidArgument, TricommError
from tricomm.gpu import Gpu
from tricomm.kernels.launch.kernel_launch import Rows
from tricomm.policy import levels
from tricomm.policy.levels import FORMS, TWO_LEVEL, Parts
from tricomm.policy.selection import Choice
from tricomm.store.control import ControlPage, Fault, PackedDescriptor

_BROADCAST = Request("broadcast", "none", root=0)
_GATHER = Request("all_gather", "none")


@dataclass(frozen=True)
class Inside:
    """A group of some of the ranks, which share memory: its collaborators, and how to close it."""

    group: Group
    collectives: Runs
    launcher: Launcher
    monitor: Monitor
    close: Callable[[], None]

    @property
    def control(self) -> ControlPage:
        return self.group.control

    def abort(self) -> None:
        """Make its kernels leave."""
        self.monitor.abort(Fault("GroupAborted", self.control.rank, 0, "the group that it is a part of was aborted"))


class TwoLevel:
    """One rank's part in the two levels of its group. `faults` and `monitor` are the whole group's. `sharing` are the
    groups of some of the ranks with memory of their own: the one inside, and the one across if kernels run there."""

    def __init__(
        self, parts: Parts, faults: Faults, monitor: Monitor, sharing: Sequence[Inside], across: Across, bridge: Bridge
    ) -> None:
        group, inside = faults.group, sharing[0]
        self.parts, self.across, self.sharing = parts, across, tuple(sharing)
        self._faults, self._monitor, self._inside, self._bridge = faults, monitor, inside, bridge
        self._gpu: Gpu | None = group.gpu
        self._control = group.control
        self._device = group.device.type
        self._size, self._position = parts.size, parts.position(group.rank)

    def announce(self, record: PackedDescriptor) -> None:
        """Tell the ranks of this part of a call of the whole group, whatever runs it."""
        self._bridge.entered = self._inside.launcher.sequence
        try:
            self._inside.launcher.announce(record)
        except TricommError:
            self._raise()
            raise

    def withdraw(self, calls: int) -> None:
        """Take back calls that were announced."""
        self._inside.launcher.withdraw(calls)

    def plan(self, request: Request, nbytes: int, reason: str, mode: str) -> LaunchPlan:
        """The request as a launch plan: announced, counted, watched and bounded like a kernel's. Raises
        `InvalidArgument` for a form that does not exist, or a reduction that one level does not have."""
        choice = self.choose(request, nbytes, reason)
        dtype = request.dtype
        assert dtype is not None, "an all_reduce has tensors"
        self.across.check(_steps(request.op or "", dtype)[1], dtype)
        name = str(dtype).removeprefix("torch.")
        fingerprint, record = launch_plan.announced(choice, request.op or "none", name, request, mode)
        act = self._shards if choice.protocol == "shards" else self._leaders

        def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: Rows = ()) -> None:
            try:
                with self._monitor.user_call(self._gpu):
                    act(request, fingerprint, _flat(x), _flat(y))
            except ConnectionLost as error:
                self._bridge.explain(str(error))
                self._faults.raise_fault()
            except InvalidArgument:
                raise
            except TricommError as error:
                self._raise()
                where = f"between {', '.join(map(self.parts.named, range(self.parts.count)))}"
                self._monitor.abort(self._faults.of(type(error), f"{where}: {error}"))
                self._faults.raise_fault()

        return LaunchPlan(choice, fingerprint, request.elements, record, run, mode)

    def choose(self, request: Request, nbytes: int, reason: str) -> Choice:
        """The form of a call as a choice, by the table unless the caller names one."""
        if request.protocol not in (None, *FORMS):
            raise InvalidArgument(
                f"{request.collective}: there is no {TWO_LEVEL}/{request.protocol}; there is "
                + ", ".join(f"{TWO_LEVEL}/{form}" for form in FORMS)
            )
        by_table = levels.choose(self._device, self.parts.between, nbytes)
        form = request.protocol or by_table.form or FORMS[0]
        why = f"{reason}; kernels inside {self.parts.count} {self.parts.between} of {self._size} ranks, "
        why += f"{self.across.name} across, by {form}"
        return Choice(request.collective, TWO_LEVEL, form, 0, 0, 0, why, "levels", None, route=TWO_LEVEL)

    # Forms

    def _shards(self, request: Request, fingerprint: int, x: torch.Tensor, y: torch.Tensor) -> None:
        inner, across, divide = _steps(request.op or "", x.dtype)
        size, count = self._size, x.numel()
        row = -(-count // size)
        source, target = x, y
        if row * size != count:
            source = target = torch.empty(row * size, dtype=x.dtype, device=x.device)
            source[:count].copy_(x)
            source[count:].view(torch.uint8).zero_()
        shard = target[self._position * row : (self._position + 1) * row]
        self._inside.collectives.run(Request("reduce_scatter", inner), source, shard, row)
        self._across(shard, across, request, fingerprint)
        if divide:
            torch.div(shard, len(self.parts.of), rounding_mode="trunc", out=shard)
        self._inside.collectives.run(_GATHER, shard, target, row)
        if target is not y:
            y.copy_(target[:count])

    def _leaders(self, request: Request, fingerprint: int, x: torch.Tensor, y: torch.Tensor) -> None:
        inner, across, divide = _steps(request.op or "", x.dtype)
        first = self._position == 0
        self._inside.collectives.run(Request("reduce", inner, root=0), x, y if first else x, x.numel())
        if first:
            self._across(y, across, request, fingerprint)
            if divide:
                torch.div(y, len(self.parts.of), rounding_mode="trunc", out=y)
        self._inside.collectives.run(_BROADCAST, y, y, y.numel())

    def _across(self, x: torch.Tensor, op: str, request: Request, fingerprint: int) -> None:
        mine = self._control.last(self._control.rank)
        text = mine.text() if mine is not None else request.collective
        self.across.all_reduce(x, op, (fingerprint, text), self._faults.check)

    # Faults and the end

    def _raise(self) -> None:
        """If this part has a fault, raise it as the whole group's."""
        self._monitor.diverging(
            self._monitor.channels[0]
        )  # between islands: the caller's calls say more than the steps
        self._bridge.look(0.0)
        if self._monitor.fault is not None:
            self._faults.raise_fault()

    def error(self) -> str | None:
        """None: the bridge judges NCCL's own errors."""
        return None

    def abort(self) -> None:
        """Make both levels leave. Idempotent."""
        self._bridge.look(0.0)
        self.across.abort()

    def close(self, kept: bool = False) -> None:
        """End both levels; idempotent. `kept`: a graph may still use the level across."""
        WATCHER.discard(self._bridge)
        self._bridge.close()
        self._inside.close()
        if not kept:
            self.across.close(self._monitor.fault is not None, LEAVE_SECONDS)


def _steps(op: str, dtype: torch.dtype) -> tuple[str, str, bool]:
    """The operations inside and across, and whether to divide the result: an integer's average truncates only once."""
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return "sum", "sum", True
    return op, op, False


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Contiguous `x` as a row of stride 1; a single element may come with any stride."""
    return x.as_strided((x.numel(),), (1,))
