"""Repeats a known fused call: what its shape decides is known, so only its tensors' own properties are checked.

Built for speed, like `PreparedCalls.repeat`: `fused_checks` accepts whatever this accepts, and takes several times as
long. `fused_checks` takes any other call, and names the mistake if there is one. Only compiled kernels are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tricomm.core import fused_kernels
from tricomm.core.faults import Faults
from tricomm.core.fused.fused_call import FusedCall
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.kernels import layout
from tricomm.kernels.launch.kernel_launch import Again

# The tensors of a call, by their places in the tuples here: in the kernel's order.
X, RESIDUAL_OUT, WEIGHT, RESIDUAL, NORM_OUT, SCALE, QUANT_OUT, SCALE_OUT = range(8)
_OUTPUTS = (RESIDUAL_OUT, NORM_OUT, QUANT_OUT, SCALE_OUT)
_MAY_BE = {(RESIDUAL_OUT, RESIDUAL), (RESIDUAL_OUT, X), (NORM_OUT, X)}  # the same memory
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STATUS = layout.STATUS

Tensors = Sequence[torch.Tensor | None]


class KnownCall:
    """A call that was made.

    slots   for each tensor that the kernel takes: its place, what makes it (None: it is given), type, shape, bytes of
            an element and of all, and 15 if it has to be aligned, else 0
    apart   for each given output and each other given tensor: their indices in `slots`, their bytes, and whether they
            may be the same memory
    apart_at  the last addresses that passed the check of `apart`
    plans   by 2 * captured + aligned: the plan and the launch of its kernel
    """

    __slots__ = ("apart", "apart_at", "plans", "slots")

    def __init__(self, given: Tensors, call: FusedCall, results: Tensors) -> None:
        blocks = call.epilogue.quantize == "nvfp4"
        bytewise = (SCALE,) if blocks else (SCALE, SCALE_OUT)
        there = [(n, t) for n, t in enumerate(results) if t is not None]
        self.slots = [
            (
                n,
                None if given[n] is not None else _maker(n, t, blocks),
                t.dtype,
                t.shape,
                t.itemsize,
                t.nbytes,
                0 if n in bytewise else 15,
            )
            for n, t in there
        ]
        given_ones = [(at, n, t.nbytes) for at, (n, t) in enumerate(there) if given[n] is not None]
        self.apart = [
            (at, other, nbytes, more, (n, m) in _MAY_BE)
            for at, n, nbytes in given_ones
            if n in _OUTPUTS
            for other, m, more in given_ones
            if m not in _OUTPUTS or m > n
        ]
        self.apart_at: list[int] = []
        self.plans: list[tuple[LaunchPlan, Again] | None] = [None] * 4


def _maker(place: int, like: torch.Tensor, blocks: bool) -> Callable[[], torch.Tensor]:
    if place == SCALE:  # the tensor of a scale that was given as a number
        return lambda: like
    shape, dtype, device = like.shape, like.dtype, like.device
    make = torch.zeros if place == SCALE_OUT and blocks else torch.empty
    return lambda: make(shape, dtype=dtype, device=device)


class FusedRepeats:
    """One group's known fused calls."""

    def __init__(self, group: Group, faults: Faults, planner: Planner, launcher: Launcher) -> None:
        self._group, self._faults, self._planner, self._launcher = group, faults, planner, launcher
        self._device, self._gpu, self._monitor = group.device, group.gpu, faults.monitor

    def repeat(self, key: Any, given: Tensors) -> Sequence[Any] | None:
        """Make the call `key` again; returns its tensors, including those that it allocates. None, with nothing done,
        if it is not known or if a tensor needs a closer look than this.

        `key` is all of a call but x's type and shape, with the types of its numbers: True must not pass for 1.
        """
        x: Any = given[X]
        try:
            known = self._planner.prepared[x.dtype, x.shape, key]
            looked_at = self._looked_at(known, given)
        except (KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError):
            return None  # never made, or a tensor without storage: sparse, or wrapped by vmap or grad
        if looked_at is None:
            return None
        tensors, addresses, aligned = looked_at
        captured = (gpu := self._gpu) is not None and gpu.capturing()
        planned = known.plans[2 * captured + aligned]
        if planned is None:
            return None
        group = self._group
        if group.flags[_STATUS] or group.refusing or self._monitor.fault is not None:
            self._faults.check_usable()
        if captured:
            self._launcher.captured = True
        plan, again = planned
        self._launcher.launch(plan, x, x, (), again, addresses)
        return tensors

    def _looked_at(self, known: KnownCall, given: Tensors) -> tuple[Sequence[Any], list[int], bool] | None:
        """The call's tensors, the addresses of those that the kernel takes, and whether these are aligned; None if one
        differs from the known call's, or overlaps another one."""
        device, grad, tensors = self._device, torch.is_grad_enabled(), given
        addresses, low = [], 0
        for place, make, dtype, shape, itemsize, nbytes, bits in known.slots:
            if make is not None:
                t: Any = make()
                tensors = [*tensors]
                tensors[place] = t
            else:
                t = given[place]
                if not (
                    type(t) in _PLAIN
                    and t.dtype is dtype
                    and t.shape == shape
                    and t.device == device
                    and t.is_contiguous()
                    and not (t.requires_grad and grad)
                    and not t.is_neg()
                    and len(t.untyped_storage()) >= t.storage_offset() * itemsize + nbytes
                ):
                    return None
            address = t.data_ptr()
            addresses.append(address)
            low |= address & bits
        if addresses != known.apart_at:
            for at, other, nbytes, more, may_be in known.apart:
                start, first = addresses[at], addresses[other]
                if start < first + more and first < start + nbytes and not (may_be and start == first):
                    return None
            known.apart_at = addresses
        return tensors, addresses, not low

    def learn(self, key: Any, given: Tensors, call: FusedCall, plans: Sequence[LaunchPlan], results: Tensors) -> None:
        """Keep the `plans` of a fused call that has just been made, one for each mode, for `repeat`."""
        x: Any = results[X]
        key = (x.dtype, x.shape, key)
        known = self._planner.prepared.get(key) or KnownCall(given, call, results)
        for plan in plans:
            with_operands = getattr(plan.run, "with_operands", None)  # interpreted, timed and watched kernels have none
            if with_operands is None:
                return
            again = with_operands(plan.numel, plan.fingerprint, fused_kernels.operands(call))
            known.plans[2 * (plan.mode == "graph") + fused_kernels.aligned(call)] = plan, again
        self._planner.keep(key, known)
