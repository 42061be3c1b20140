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
    """What a quantising call gives: codes, their scales (None if the scale was given), the new residual, and the norm
    (None unless it was asked for)."""

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
        """Reduce `x` over all ranks, add `residual`, and normalise each row: (norm, new residual), of x's shape.

        `x` is [..., hidden] of fp32, fp16 or bf16, `residual` the same or None (the new residual is the sum then),
        `weight` is [hidden] of x's type or fp32. The sum has the bits of `all_reduce`; the residual is added in fp32
        and rounded to x's type; the norm is residual * rsqrt(mean(residual ** 2) + eps) * (weight + weight_bias) of
        the rounded residual, in fp32, rounded once. `weight_bias` is 1.0 for Gemma.

        `norm_out` and `residual_out` take the results, in new memory if they are None: `norm_out` may be `x`,
        `residual_out` may be `residual` or `x`. `residual`, `weight` and the numbers have to be the same on all ranks;
        the numbers are compared. If no fused kernel takes a call (`explain` says why), an all-reduce and torch run
        it. With `async_op=True` a `Work` is returned. Raises `InvalidArgument` before anything is sent, or the
        group's fault.
        """
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
        """As `all_reduce_rms_norm`, and quantise the norm: `Quantized(codes, scales, residual, norm)`.

        `quantize` is

        "fp8"            codes float8_e4m3fn of x's shape: norm / `scale`, at most 448; `scale` is a number or a tensor
                         of one fp32 element, the same on all ranks
        "fp8_per_token"  likewise, with a scale for each row: largest magnitude / 448, in `scales`, [..., 1] fp32
        "nvfp4"          codes uint8 [..., hidden / 2], two e2m1 a byte, in blocks of 16 elements; `scales` are bytes
                         of e4m3: a block's largest magnitude / 6 * `scale`; `scale_layout` is swizzled_128x4 (the
                         default; rows are padded to 128, blocks to 4) or linear

        The norm itself is written only into a given `norm_out`. Raises as `all_reduce_rms_norm` does.
        """
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
