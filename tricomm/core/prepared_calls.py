"""Repeats calls. A call of the same shape has a plan already, so only the properties of its tensors are checked.

    all_reduce, all_gather ... -> repeat -> launch of a kernel that is bound already
                                         -> None: planned like a first call, which checks everything

Built for speed: on a GPU this is most of a small collective's host time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tricomm import arguments
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.kernels import layout
from tricomm.kernels.launch.kernel_launch import Again

_STATUS = layout.STATUS
_MOST_MODES = 4


class PreparedCall:
    """A call of one contiguous tensor, or of an input and an output.

    look      the check (`arguments.look`) in the modes of the last call; `looks` has the checks for other modes
    itemsize  bytes of an element; `nbytes` of the input, `out_nbytes` of the output
    rest      bytes of a row that may begin anywhere, else 0: its last four bits decide whether rows are aligned
    apart     the only offset in bytes from the output at which the input may overlap it; None: at none
    made      shape of an output that each call allocates; None if it is given
    plans     index 2 * captured + aligned: the plan, and its kernel's repeated launch if there is one
    """

    __slots__ = ("apart", "itemsize", "look", "looks", "made", "nbytes", "out_nbytes", "plans", "rest")

    def __init__(self, x: torch.Tensor, y: torch.Tensor, rest: int, apart: int | None, made: bool) -> None:
        self.itemsize, self.nbytes, self.out_nbytes, self.rest = x.itemsize, x.nbytes, y.nbytes, rest
        self.apart, self.made = apart, y.shape if made else None
        self.look: Callable[..., bool] = lambda *tensors: False
        self.looks: list[Callable[..., bool]] = []
        self.plans: list[tuple[LaunchPlan, Again | None] | None] = [None] * 4

    def seen(self, *tensors: torch.Tensor) -> bool:
        """Whether the call has been made with such tensors in another mode of the caller."""
        for look in self.looks:
            if look(*tensors):
                self.look = look
                return True
        return False


class PreparedCalls:
    """Repeats the calls of one group."""

    def __init__(self, group: Group, faults: Faults, planner: Planner, launcher: Launcher) -> None:
        self._group, self._faults, self._planner, self._launcher = group, faults, planner, launcher
        self._known, self._gpu, self._monitor, self._launch = (
            planner.prepared,
            group.gpu,
            faults.monitor,
            launcher.launch,
        )

    def repeat(self, kind: Any, x: Any, out: Any = None) -> torch.Tensor | None:
        """Make the call `kind` again and return its output, which is `x` if the call is in place. Returns None, and
        does nothing, if the call is not known or if its tensors need the checks of a first call.

        `kind` is (collective, op, algorithm, protocol, root, whether no output is given).
        """
        y: torch.Tensor
        try:
            known: PreparedCall = self._known[kind, x.dtype, x.shape]
            if out is None:
                like = known.look(x) or known.seen(x)
            else:
                like = known.look(x, out) or known.seen(x, out)
                like = like and len(out.untyped_storage()) >= out.storage_offset() * known.itemsize + known.out_nbytes
            if not like or len(x.untyped_storage()) < x.storage_offset() * known.itemsize + known.nbytes:
                return None
            address = x.data_ptr()
            if out is not None:
                y, target = out, out.data_ptr()
                if -known.nbytes < address - target < known.out_nbytes and address - target != known.apart:
                    return None
            elif known.made is None:
                y, target = x, address
            else:
                y = torch.empty(known.made, dtype=x.dtype, device=x.device)
                target = y.data_ptr()
        # Never made, no tensor, or one without storage: sparse, or wrapped by vmap or grad; no memory for the output.
        except (KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError):
            return None
        aligned = (address | target | known.rest) % 16 == 0
        captured = (gpu := self._gpu) is not None and gpu.capturing()
        entry = known.plans[2 * captured + aligned]
        if entry is None:
            return None
        group = self._group
        if group.flags[_STATUS] or group.refusing or self._monitor.fault is not None:  # in a forked child it refuses
            self._faults.check_usable()
        if captured:
            self._launcher.captured = True
        plan, again = entry
        self._launch(plan, x, y, (), again, (address, target))
        return y

    def learn(
        self, request: Request, x: torch.Tensor, out: torch.Tensor | None, y: torch.Tensor, elements: int
    ) -> bool:
        """Keep the plans of a call that has just been made, of `x` into `y`, with `elements` a row; `out` was given.
        False if there are no plans."""
        whole = request.collective == "all_reduce"
        rest = 0 if whole else elements * x.itemsize
        aligned = (x.data_ptr() | y.data_ptr() | rest) % 16 == 0
        plans = self._planner.planned(request, x.dtype, elements, aligned)
        kind = (*request[:5], out is None)
        given = (x,) if out is None else (x, out)
        known = self._known.get((kind, x.dtype, x.shape))
        if known is None:
            known = PreparedCall(x, y, rest, self._apart(request, rest), out is None and y is not x)
            self._planner.keep((kind, x.dtype, x.shape), known)
        if not known.look(*given) and not known.seen(*given):
            known.look = arguments.look(*given)
            known.looks = [*known.looks[1 - _MOST_MODES :], known.look]
        for plan in plans:
            repeat = getattr(plan.run, "repeat", None)  # interpreted, timed and watched kernels have none
            again = repeat and repeat(plan.numel, plan.fingerprint)
            known.plans[2 * (plan.mode == "graph") + aligned] = plan, again
        return bool(plans)

    def _apart(self, request: Request, row: int) -> int | None:
        """The offset in the output at which an input may overlap it; the same rule as `arguments.check_apart`."""
        takes = {"reduce_scatter": -1, "scatter": -1, "all_to_all": None}.get(request.collective, 1)
        return None if takes is None else takes * self._group.rank * row
