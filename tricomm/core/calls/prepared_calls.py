"""Prepared calls: a call that was made before is launched after one check of its tensors.

    all_reduce, all_gather ... -> run -> launch of a kernel that is bound already
                                      -> `first`, which checks everything and plans, for a call that is new

Optimised for speed: on a GPU this is most of a small collective's host time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tricomm import arguments
from tricomm.core.calls.first_calls import FirstCalls, Kind, total
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.kernels import layout
from tricomm.kernels.launch.kernel_launch import Again

_STATUS = layout.STATUS
_MOST_VARIANTS = 8
_BARRIER = Request("barrier")
_ONE_GETS = frozenset({"reduce", "gather"})
# A call that was never made; no tensor, or one without storage (sparse, or wrapped by vmap or grad); no memory for the
# output.
NEW = (LookupError, TypeError, AttributeError, RuntimeError, NotImplementedError)


@dataclass(slots=True, eq=False)
class PreparedCall:
    """A call of one contiguous tensor, or of an input and an output.

    look      the check of the tensors (`arguments.look`)
    itemsize  bytes of an element; `nbytes` of the input, `out_nbytes` of the output
    rest      bytes of a row if rows may be unaligned, which its last four bits decide, else 0; if rows are uneven, the
              numbers in a row
    apart     the only offset in bytes from the output at which the input may overlap it; None: it may not overlap
    make      function that allocates the output, with the number of rows if they are uneven; None if the output is
              given
    gives     whether this rank gets a result
    plans     index 2 * captured + aligned: the plan, and its kernel's repeated launch if there is one
    """

    look: Callable[..., bool]
    itemsize: int
    nbytes: int
    out_nbytes: int
    rest: int
    apart: int | None
    make: Callable[..., torch.Tensor] | None
    gives: bool
    plans: list[tuple[LaunchPlan, Again | None] | None] = field(default_factory=lambda: [None] * 4)


class PreparedCalls:
    """The prepared calls of one group. Those that are new are made by `FirstCalls`.

    They are kept by kind and shapes, in lists of calls that differ in types or in the caller's mode, the latest one
    first.
    """

    def __init__(self, group: Group, faults: Faults, planner: Planner, launcher: Launcher) -> None:
        self._group, self._faults, self._planner, self._launcher = group, faults, planner, launcher
        self._first = FirstCalls(group, faults, planner, launcher)
        self._calls, self._gpu, self._monitor, self._launch = (
            planner.prepared,
            group.gpu,
            faults.monitor,
            launcher.launch,
        )

    def run(self, kind: Kind, x: Any, out: Any = None, async_op: bool = False, known_only: bool = False) -> Any:
        """Make a call and return its result. With `known_only` a call that is new, or that needs the checks of a first
        call, is not made, and None is returned."""
        entry, y = None, x
        captured = False
        if (gpu := self._gpu) is not None:
            if gpu.current_device() != gpu.index:
                return gpu.under(self.run)(kind, x, out, async_op, known_only)
            captured = gpu.capturing()
        try:
            if out is None:
                known = (variants := self._calls[kind, x.shape])[0]
                if not known.look(x):
                    known = first_like(variants, x)
                address = target = x.data_ptr()
                if known.make is not None:
                    y = known.make()
                    target = y.data_ptr()
            else:
                if out.is_nested:  # `look` would crash
                    raise LookupError
                known = (variants := self._calls[kind, x.shape])[0]
                if not known.look(x, out):
                    known = first_like(variants, x, out)
                y, address, target = out, x.data_ptr(), out.data_ptr()
                if len(out.untyped_storage()) < out.storage_offset() * known.itemsize + known.out_nbytes or (
                    target - known.nbytes < address < target + known.out_nbytes and address - target != known.apart
                ):
                    raise LookupError
            if len(x.untyped_storage()) >= x.storage_offset() * known.itemsize + known.nbytes:
                entry = known.plans[2 * captured + (not (address | target | known.rest) % 16)]
        except NEW:
            pass
        if entry is None:
            return None if known_only else self._new(kind, x, out, async_op)
        group = self._group
        if group.flags[_STATUS] or group.refusing or self._monitor.fault is not None:  # in a forked child this refuses
            self._faults.check_usable()
        if captured:
            self._launcher.captured = True
        plan, again = entry
        self._launch(plan, x, y, (), again, (address, target))
        if not known.gives:
            y = None
        return self._launcher.finish(y, True) if async_op else y

    def run_uneven(self, kind: Kind, x: Any, sends: Any, takes: Any, out: Any, async_op: bool) -> Any:
        """Make a call whose numbers of rows may change each time, and return its output."""
        entry, y, group, captured = None, out, self._group, False
        if (gpu := self._gpu) is not None:
            if gpu.current_device() != gpu.index:
                return gpu.under(self.run_uneven)(kind, x, sends, takes, out, async_op)
            captured = gpu.capturing()
        try:
            given = (x,) if out is None else (x, out)
            known = first_like(self._calls[kind, *(t.shape[1:] for t in given)], *given)
            length = total(sends, takes, group.rank, group.world_size, x.shape[0], known.rest)
            if known.make is not None:
                y = known.make(length)
            elif y.shape[0] != length:
                raise LookupError
            address, target, nbytes, out_nbytes = x.data_ptr(), y.data_ptr(), x.nbytes, y.nbytes
            if (
                len(x.untyped_storage()) >= x.storage_offset() * known.itemsize + nbytes
                and len(y.untyped_storage()) >= y.storage_offset() * known.itemsize + out_nbytes
                and not target - nbytes < address < target + out_nbytes
            ):
                entry = known.plans[2 * captured + (not (address | target) % 16)]
        except NEW:
            pass
        if entry is None:
            return self._new(kind, x, out, async_op, (sends, takes))
        self._faults.check_usable()
        if captured:
            self._launcher.captured = True
        self._launch(entry[0], x, y, (tuple(sends), tuple(takes)))
        return self._launcher.finish(y, async_op)

    def remember(self, op: str, x: torch.Tensor) -> bool:
        """Prepare all_reduces of tensors like `x`, after a call with the same number of elements in another shape.
        False if such tensors need the checks of a first call."""
        if type(x) is not torch.Tensor or x.requires_grad or not x.is_contiguous():
            return False
        kind = ("all_reduce", op, None, None, -1, True)
        return self.learn(kind, Request("all_reduce", op), (x,), x, x.numel())

    def barrier(self, *, async_op: bool) -> Any:
        """As `Communicator.barrier`."""
        group = self._group
        self._faults.check_usable()
        self._launch(self._planner.plan(_BARRIER, None, 0, True), group.table, group.table)
        if not async_op:
            self._launcher.wait(group.timeout)
        return self._launcher.finish(None, async_op)

    def _new(self, kind: Kind, x: Any, out: Any, async_op: bool, splits: tuple[Any, Any] | None = None) -> Any:
        """Make a call that is new, and keep it."""
        made = self._first.make(kind, x, out, splits)
        if made.output is not None:
            self.learn(kind, made.request, made.given, made.output, made.elements)
        return self._launcher.finish(made.result, async_op)

    def learn(
        self, kind: Kind, request: Request, given: tuple[torch.Tensor, ...], y: torch.Tensor, elements: int
    ) -> bool:
        """Keep the plans of a call that has just been made, of tensors `given` into `y`, with `elements` elements a
        row. False if there are no plans."""
        x, uneven = given[0], request.collective == "all_to_all_v"
        row = elements * x.itemsize
        rest = 0 if request.collective == "all_reduce" or uneven else row
        aligned = not (x.data_ptr() | y.data_ptr() | rest) % 16
        plans = self._planner.planned(request, x.dtype, elements, aligned)
        key = (kind, *(t.shape[1:] for t in given)) if uneven else (kind, x.shape)

        def prepared() -> PreparedCall:
            make = None if y is x or len(given) == 2 else arguments.allocator(y, uneven)
            gives = request.collective not in _ONE_GETS or request.root == self._group.rank
            look = arguments.look(*given, uneven=uneven)
            count = elements * (2 if x.is_complex() else 1) if uneven else rest
            return PreparedCall(look, x.itemsize, x.nbytes, y.nbytes, count, self._apart(request, rest), make, gives)

        known = known_like(self._planner, key, given, prepared)
        for plan in plans:
            repeat = getattr(plan.run, "repeat", None)  # interpreted, timed and watched kernels have none
            again = repeat and repeat(plan.numel, plan.fingerprint)
            known.plans[2 * (plan.mode == "graph") + aligned] = plan, again
        return bool(plans)

    def _apart(self, request: Request, row: int) -> int | None:
        """The offset in the output at which an input may overlap it; the same rule as `arguments.check_apart`."""
        takes = {"reduce_scatter": -1, "scatter": -1, "all_to_all": None}.get(request.collective, 1)
        return None if takes is None else takes * self._group.rank * row


def known_like(planner: Planner, key: Any, given: Sequence[torch.Tensor], make: Callable[[], Any]) -> Any:
    """The call prepared as `key` that fits the tensors `given`; if there is none, a new one by `make`."""
    variants = planner.prepared.get(key, [])
    try:
        return first_like(variants, *given)
    except LookupError:
        variants.insert(0, make())
        del variants[_MOST_VARIANTS:]
        planner.keep(key, variants)
        return variants[0]


def first_like(variants: list[Any], *given: torch.Tensor) -> Any:
    """The call that fits the tensors `given`, moved to the front; raises `LookupError` if there is none."""
    for place, known in enumerate(variants):
        if known.look(*given):
            if place:
                variants[:] = [known, *variants[:place], *variants[place + 1 :]]
            return known
    raise LookupError
