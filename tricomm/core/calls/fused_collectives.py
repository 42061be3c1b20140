"""all_reduce + residual + RMSNorm (+ quantisation) of a communicator, by a fused kernel or by an all-reduce and torch.

    tensors -> checked -> plan, the same on all ranks -> fused kernel
                                                      -> all-reduce by a kernel or NCCL -> `unfused.finish`

All ranks take the same route, because it follows from what they have to agree on: shapes, types, the epilogue's facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tricomm.core import fused_kernels
from tricomm.core.calls.fused_repeat import NORM_OUT, QUANT_OUT, RESIDUAL_OUT, SCALE_OUT, FusedRepeats, Tensors
from tricomm.core.faults import Faults
from tricomm.core.fused import fused_checks, unfused
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS, FusedCall
from tricomm.core.fused.fused_checks import FusedArguments
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.core.symmetric import Symmetric
from tricomm.errors import InvalidArgument


class Quantized(NamedTuple):
    """Result of a quantising call: codes, their scales (None if the scale was given), the new residual, and the norm
    (None without `norm_out`)."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    residual: torch.Tensor
    norm: torch.Tensor | None


class FusedCollectives:
    """One group's fused collectives. `residual`, `weight`, numbers and scales have to be the same on all ranks."""

    def __init__(self, group: Group, faults: Faults, planner: Planner, launcher: Launcher) -> None:
        self._group, self._faults, self._planner, self._launcher = group, faults, planner, launcher
        self._repeats = FusedRepeats(group, faults, planner, launcher)

    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-6,
        *,
        weight_bias: float = 0.0,
        norm_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """As `Communicator.all_reduce_rms_norm`."""
        given = (x, residual_out, weight, residual, norm_out, None, None, None)
        key = (
            eps,
            type(eps),
            weight_bias,
            type(weight_bias),
            residual is None,
            residual_out is None,
            norm_out is None,
            algorithm,
            protocol,
        )
        tensors = self._repeats.repeat(key, given)
        if tensors is None:
            arguments = FusedArguments(_local(x), residual, weight, eps, weight_bias, residual_out, norm_out)
            tensors = self._first(key, given, arguments, algorithm, protocol)
        return self._launcher.finish((tensors[NORM_OUT], tensors[RESIDUAL_OUT]), async_op)

    def all_reduce_rms_norm_quantized(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-6,
        *,
        quantize: str,
        scale: torch.Tensor | float | None = None,
        scale_layout: str | None = None,
        weight_bias: float = 0.0,
        norm_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        quant_out: torch.Tensor | None = None,
        scale_out: torch.Tensor | None = None,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """As `Communicator.all_reduce_rms_norm_quantized`."""
        if quantize is None:
            raise InvalidArgument(
                f"{FUSED}: quantize=None: all_reduce_rms_norm does not quantise; here is {', '.join(QUANTIZATIONS)}"
            )
        static = scale if isinstance(scale, torch.Tensor) else None
        number = scale if static is None else None
        given = (x, residual_out, weight, residual, norm_out, static, quant_out, scale_out)
        key = (
            eps,
            type(eps),
            weight_bias,
            type(weight_bias),
            residual is None,
            residual_out is None,
            norm_out is None,
            algorithm,
            protocol,
            quantize,
            scale_layout,
            number,
            type(scale),
            quant_out is None,
            scale_out is None,
        )
        tensors = self._repeats.repeat(key, given)
        if tensors is None:
            arguments = FusedArguments(
                _local(x),
                residual,
                weight,
                eps,
                weight_bias,
                residual_out,
                norm_out,
                quantize,
                scale,
                scale_layout,
                quant_out,
                scale_out,
            )
            tensors = self._first(key, given, arguments, algorithm, protocol)
        result = Quantized(tensors[QUANT_OUT], tensors[SCALE_OUT], tensors[RESIDUAL_OUT], norm_out)
        return self._launcher.finish(result, async_op)

    def _first(
        self, key: Any, given: Tensors, arguments: FusedArguments, algorithm: str | None, protocol: str | None
    ) -> list[Any]:
        """Check a call and make it: its tensors by their places, those that it makes in the shape of x."""
        self._faults.check_usable()
        call = fused_checks.checked(arguments, self._group.device)
        x = arguments.x
        blocks = call.epilogue.quantize == "nvfp4"
        made = (
            None,
            _like(call.residual_out, x),
            None,
            None,
            _like(call.norm_out, x),
            call.scale,
            _like(call.quant_out, x),
            call.scale_out if blocks else _like(call.scale_out, x),
        )
        results = [one if one is not None else other for one, other in zip(given, made, strict=True)]
        plans = self.run_checked(call, algorithm, protocol)
        if plans:
            self._repeats.learn(key, given, call, plans, results)
        return results

    def run_checked(
        self, call: FusedCall, algorithm: str | None = None, protocol: str | None = None
    ) -> Sequence[LaunchPlan]:
        """Run a call that `fused_checks.checked` has made for this group's device; called by all ranks. Returns the
        plans of its fused kernel, of each mode; none if the call is not fused."""
        aligned = fused_kernels.aligned(call)
        request = Request("all_reduce", "sum", algorithm, protocol, epilogue=call.epilogue)
        plan = self._planner.plan(request, call.x.dtype, call.x.numel(), aligned)
        if not call.x.numel():
            return ()
        if plan.choice.fused:
            fused_kernels.launch(self._launcher, plan, call)
            return self._planner.planned(request, call.x.dtype, call.x.numel(), aligned)
        total = unfused.total_of(call)
        self._launcher.launch(plan, call.x, total)
        with torch.no_grad():
            unfused.finish(call, total)
        return ()


def _local(x: Any) -> Any:
    return x.local if isinstance(x, Symmetric) else x


def _like(y: Any, x: torch.Tensor) -> Any:
    """`y`, which has rows, in the shape of `x` but for its last dimension; None if it is None."""
    return None if y is None else y.view(*x.shape[:-1], y.shape[-1])
