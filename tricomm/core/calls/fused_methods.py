"""The fused calls of a communicator: its public methods, and the guard around each."""

from __future__ import annotations

from typing import Any, Literal

import torch

from tricomm.core.calls.fused_calls import FusedCalls, Quantized
from tricomm.core.entry_guard import Guard, entry, guarded
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS
from tricomm.core.fused.fused_checks import FusedArguments
from tricomm.core.launcher import Launcher
from tricomm.core.work import or_work
from tricomm.errors import InvalidArgument
from tricomm.gpu import Gpu
from tricomm.kernels.device.epilogue import nothing


class FusedMethods:
    """All-reduces fused with the steps after them."""

    _gpu: Gpu | None
    _guard: Guard
    _fused: FusedCalls
    _launcher: Launcher

    @or_work
    @entry
    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-06,
        *,
        weight_bias: float = 0.0,
        norm_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        try:
            asked = FusedArguments(x, residual, weight, eps, weight_bias, residual_out, norm_out)
            return self._fused.run(asked, algorithm, protocol, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def all_reduce_rms_norm_quantized(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-06,
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
        async_op: Literal[False] = False,
    ) -> Quantized:
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
        try:
            if quantize is None:
                raise InvalidArgument(f"{FUSED}: quantize=None; there is {', '.join(QUANTIZATIONS)}")
            rows = x, residual, weight, eps, weight_bias, residual_out, norm_out
            asked = FusedArguments(*rows, quantize, scale, scale_layout, quant_out, scale_out)
            return self._fused.run(asked, algorithm, protocol, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @guarded
    def all_reduce_rows(
        self,
        x: torch.Tensor,
        epilogue: Any,
        *operands: Any,
        prepare: Any = None,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """Sum `x`, [..., hidden] of fp16, bf16 or fp32, over all ranks, and hand each row to `epilogue` on every rank.

        `epilogue(row, operands, SPEC)` is a `@triton.jit` function (docs/fused.md); it writes its results to tensors
        among `operands`, which are contiguous tensors on this device, and numbers. `x` is not changed. `hidden` is a
        multiple of 8 up to 16384. All ranks pass the same function, and operands of the same types. Returns None.
        Raises `InvalidArgument` for arguments that do not fit.
        """
        self._fused.run_rows(x, epilogue, operands, prepare or nothing, (algorithm, protocol))
        return self._launcher.finish(None, async_op)
