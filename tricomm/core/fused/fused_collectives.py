"""all_reduce + residual + RMSNorm (+ quantisation) of a communicator, by a fused kernel or by an all-reduce and torch.

    tensors -> checked -> plan, the same on all ranks -> fused kernel
                                                      -> all-reduce by a kernel or NCCL -> `unfused.finish`

The ranks agree on the way, because it follows from what they have to agree on: shapes, types, the epilogue's facts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tricomm.core.faults import Faults
from tricomm.core.fused import fused_checks, fused_kernels, unfused
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS, FusedCall
from tricomm.core.fused.fused_checks import FusedArguments
from tricomm.core.group import Group
from tricomm.core.launch_plan import Request
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
    """Those of one group. `residual`, `weight`, numbers and scales have to be the same on all ranks."""

    def __init__(self, group: Group, faults: Faults, planner: Planner, launcher: Launcher) -> None:
        self._group, self._faults, self._planner, self._launcher = group, faults, planner, launcher

    def all_reduce_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6, *,
        weight_bias: float = 0.0, norm_out: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks, add `residual`, and normalise each row: (norm, new residual), of x's shape.

        `x` is [..., hidden] of fp32, fp16 or bf16, `residual` the same or None (the new residual is the sum then),
        `weight` is [hidden] of x's type or fp32. The sum has the bits of `all_reduce`; the residual is added in fp32
        and rounded to x's type; the norm is residual * rsqrt(mean(residual ** 2) + eps) * (weight + weight_bias) of
        the rounded residual, in fp32, rounded once. `weight_bias` is 1.0 for Gemma.

        `norm_out` and `residual_out` take the results, in new memory if they are None: `norm_out` may be `x`,
        `residual_out` may be `residual` or `x`. `residual`, `weight` and the numbers have to be the same on all ranks;
        the numbers are compared. Where no fused kernel takes a call (`explain` says why), an all-reduce and torch
        run it. With `async_op=True` a `Work` is returned. Raises `InvalidArgument` before anything is sent, or the
        group's fault.
        """
        given = FusedArguments(_local(x), residual, weight, eps, weight_bias, residual_out, norm_out)
        call = self._run(given, algorithm, protocol)
        norm = norm_out if norm_out is not None else _like(call.norm_out, given.x)
        return self._launcher.finish((norm, _like(call.residual_out, given.x)), async_op)

    def all_reduce_rms_norm_quantized(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6, *,
        quantize: str, scale: torch.Tensor | float | None = None, scale_layout: str | None = None,
        weight_bias: float = 0.0, norm_out: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
        quant_out: torch.Tensor | None = None, scale_out: torch.Tensor | None = None,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """As `all_reduce_rms_norm`, and quantise the norm: `Quantized(codes, scales, residual, norm)`.

        `quantize` is

        "fp8"            codes float8_e4m3fn of x's shape: norm / `scale`, at most 448; `scale` is a number or a tensor
                         of one fp32 element, the same on all ranks
        "fp8_per_token"  likewise, of a scale that each row gets: largest magnitude / 448, in `scales`, [..., 1] fp32
        "nvfp4"          codes uint8 [..., hidden / 2], two e2m1 a byte, of blocks of 16 elements; `scales` bytes of
                         e4m3, of a block's largest magnitude / 6 * `scale`; `scale_layout` is swizzled_128x4 (the
                         default; rows are padded to 128, blocks to 4) or linear

        The norm itself is written only into a `norm_out` that is given.
        """
        if quantize is None:
            raise InvalidArgument(
                f"{FUSED}: quantize=None: all_reduce_rms_norm does not quantise; here is {', '.join(QUANTIZATIONS)}"
            )
        given = FusedArguments(
            _local(x), residual, weight, eps, weight_bias, residual_out, norm_out, quantize, scale,
            scale_layout, quant_out, scale_out,
        )  # fmt: skip
        call = self._run(given, algorithm, protocol)
        codes = quant_out if quant_out is not None else _like(call.quant_out, given.x)
        scales = scale_out
        if scales is None and call.scale_out is not None:
            scales = call.scale_out if quantize == "nvfp4" else _like(call.scale_out, given.x)
        result = Quantized(codes, scales, _like(call.residual_out, given.x), norm_out)
        return self._launcher.finish(result, async_op)

    def _run(self, given: FusedArguments, algorithm: str | None, protocol: str | None) -> FusedCall:
        self._faults.check_usable()
        call = fused_checks.checked(given, self._group.device)
        self.run_checked(call, algorithm, protocol)
        return call

    def run_checked(self, call: FusedCall, algorithm: str | None = None, protocol: str | None = None) -> None:
        """Run a call that `fused_checks.checked` has made for this group's device; called by all ranks."""
        aligned = not any(t.data_ptr() % 16 for t in fused_kernels.wide(call))
        request = Request("all_reduce", "sum", algorithm, protocol, epilogue=call.epilogue)
        plan = self._planner.plan(request, call.x.dtype, call.x.numel(), aligned)
        if not call.x.numel():
            return
        if plan.choice.fused:
            fused_kernels.launch(self._launcher, plan, call)
            return
        total = unfused.total_of(call)
        self._launcher.launch(plan, call.x, total)
        with torch.no_grad():
            unfused.finish(call, total)


def _local(x: Any) -> Any:
    return x.local if isinstance(x, Symmetric) else x


def _like(y: Any, x: torch.Tensor) -> Any:
    """`y`, which has rows, in the shape of `x` but for its last dimension."""
    return y.view(*x.shape[:-1], y.shape[-1])
