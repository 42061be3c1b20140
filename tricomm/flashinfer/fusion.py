"""FlashInfer's fused all-reduce: its patterns, and the conversion of their arguments to tricomm's calls."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch

from tricomm.core.fused import fused_call
from tricomm.core.fused.expert_rows import ExpertRows
from tricomm.core.fused.fused_call import NVFP4_BLOCK, FusedArguments, scale_shape
from tricomm.errors import InvalidArgument
from tricomm.flashinfer.workspace import AllReduceFusionWorkspace


class AllReduceFusionPattern:
    """The steps after the all-reduce, by number. `Out` patterns also write the norm."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11
    kMoEFinalizeARResidualRMSNormFP8Quant = 12


class QuantizationSFLayout:
    """The layouts of NVFP4's block scales, by number."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


_Pattern = AllReduceFusionPattern
_NAMES = {number: name for name, number in vars(_Pattern).items() if name.startswith("k")}
# The patterns with a norm that are supported here: their quantisation, and whether the norm is written.
_FORMS: dict[int, tuple[str | None, bool]] = {
    _Pattern.kARResidualRMSNorm: (None, True),
    _Pattern.kARResidualRMSNormFP8Quant: ("fp8", False),
    _Pattern.kARResidualRMSNormFP4Quant: ("nvfp4", False),
    _Pattern.kARResidualRMSNormOutFP8Quant: ("fp8", True),
    _Pattern.kARResidualRMSNormOutFP4Quant: ("nvfp4", True),
    _Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant: ("fp8_per_group", False),
    _Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: ("fp8_per_group", True),
    _Pattern.kARResidualRMSNormDynamicFP8Quant: ("fp8_per_token", False),
    _Pattern.kARResidualRMSNormOutDynamicFP8Quant: ("fp8_per_token", True),
    _Pattern.kMoEReductionARResidualRMSNorm: (None, True),  # nvfp4, if there is a quant_out
    _Pattern.kMoEFinalizeARResidualRMSNorm: (None, True),
    _Pattern.kMoEFinalizeARResidualRMSNormFP8Quant: ("fp8", False),
}
# Outputs that MoE patterns do not have.
_NOT_WRITTEN = {
    _Pattern.kMoEReductionARResidualRMSNorm: ("output",),
    _Pattern.kMoEFinalizeARResidualRMSNorm: ("output", "quant_out", "scale_out"),
    _Pattern.kMoEFinalizeARResidualRMSNormFP8Quant: ("output", "norm_out", "scale_out"),
}
_LAYOUTS = {QuantizationSFLayout.SWIZZLED_128x4: "swizzled_128x4", QuantizationSFLayout.LINEAR: "linear"}


def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: Literal["trtllm", "cake"] = "trtllm",
) -> torch.Tensor:
    """All-reduce `input`, [tokens, hidden], followed by the steps of `pattern`; all ranks call it.

    Outputs that are None are allocated. Returns `quant_out` of a quantising pattern, `norm_out` of
    kARResidualRMSNorm, `output` of kAllReduce. `use_oneshot` forces one shot or two. The arithmetic is that of
    `Communicator.all_reduce_rms_norm` and its quantising form: for FP8 the norm is divided by `scale_factor`, for NVFP4
    block scales are multiplied by it. A quantising pattern without `Out` does not write `norm_out`. The MoE patterns
    compute one row for each row of `residual_in`. kMoEReductionARResidualRMSNorm takes scales expert by expert; with a
    `quant_out` it is NVFP4. Raises `InvalidArgument` (a `ValueError`) for a pattern that is not supported, a workspace
    that is too small or destroyed, and tensors that do not fit; or the group's fault.
    """
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise InvalidArgument(
            f"allreduce_fusion: workspace is a {type(workspace).__name__}; one of tricomm.flashinfer is needed"
        )
    if not isinstance(pattern, int) or (pattern not in _FORMS and pattern != _Pattern.kAllReduce):
        name = _NAMES.get(pattern, "unknown") if isinstance(pattern, int) else "no number"
        covered = ", ".join(str(number) for number in (_Pattern.kAllReduce, *_FORMS))
        raise InvalidArgument(f"allreduce_fusion: pattern {pattern!r} ({name}) is not covered; there is {covered}")
    if pattern != _Pattern.kAllReduce and (residual_in is None or rms_gamma is None):
        raise InvalidArgument(f"allreduce_fusion: {_NAMES[pattern]} needs residual_in and rms_gamma")
    experts = None
    if pattern == _Pattern.kMoEReductionARResidualRMSNorm:
        rows, scales = moe_reduction_active_experts_token_input, moe_reduction_scale_input
        experts = _reduced(residual_in, rows, scales, moe_reduction_token_input, moe_reduction_device_num_experts)
    elif pattern in (_Pattern.kMoEFinalizeARResidualRMSNorm, _Pattern.kMoEFinalizeARResidualRMSNormFP8Quant):
        if pattern == _Pattern.kMoEFinalizeARResidualRMSNormFP8Quant and expert_scale_factor is None:
            raise InvalidArgument(f"allreduce_fusion: {_NAMES[pattern]} needs an expert_scale_factor")
        experts = _finalized(input, expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output)
    if experts is not None:
        outputs = {"output": output, "norm_out": norm_out, "quant_out": quant_out, "scale_out": scale_out}
        unwritten = [name for name in _NOT_WRITTEN[pattern] if outputs[name] is not None]
        if unwritten:
            raise InvalidArgument(f"allreduce_fusion: {_NAMES[pattern]} writes no {unwritten[0]}; leave it out")
        assert residual_in is not None, "checked above"
        input = residual_in
    name = "input" if experts is None else "residual_in"
    if not isinstance(input, torch.Tensor) or input.dim() != 2:
        raise InvalidArgument(f"allreduce_fusion: {name} has to be a tensor of [tokens, hidden]")
    if not input.is_contiguous():
        raise InvalidArgument(f"allreduce_fusion: {name} has strides {input.stride()}; pass .contiguous()")
    tokens, hidden = input.shape
    reason = workspace._why_not(workspace.world_size, tokens, hidden, input.dtype)
    if reason is not None:
        raise InvalidArgument(f"allreduce_fusion: the workspace does not fit: {reason}; make another one")
    comm = workspace.comm
    algorithm = None
    if use_oneshot is not None and comm.kind != "none" and comm._internal.group.reachable:  # NCCL makes its own choice
        algorithm = "one_shot" if use_oneshot else "two_shot"
    if pattern == _Pattern.kAllReduce:
        out = torch.empty_like(input) if output is None else output
        comm.all_reduce(input, out=None if out is input else out, algorithm=algorithm)
        return out
    quantize, writes_norm = _FORMS[pattern]
    if pattern == _Pattern.kMoEReductionARResidualRMSNorm and quant_out is not None:
        quantize, writes_norm = "nvfp4", norm_out is not None
    options: dict[str, Any] = {"weight_bias": weight_bias, "residual_out": residual_out}
    rows_of = input, residual_in, rms_gamma, rms_eps
    if quantize is None and experts is None:
        norm: torch.Tensor = comm.all_reduce_rms_norm(*rows_of, norm_out=norm_out, algorithm=algorithm, **options)[0]
        return norm
    if writes_norm:
        options["norm_out"] = torch.empty_like(input) if norm_out is None else norm_out
    if quantize in ("fp8", "nvfp4"):
        if scale_factor is None:
            raise InvalidArgument(f"allreduce_fusion: {_NAMES[pattern]} needs a scale_factor")
        options["scale"] = scale_factor.float() if isinstance(scale_factor, torch.Tensor) else scale_factor
    if quantize == "nvfp4":
        layout = _layout(layout_code)
        options["scale_layout"] = layout
        scale_out = _first_bytes(scale_out, math.prod(scale_shape(tokens, hidden, layout)), hidden)
    elif quantize == "fp8_per_token":
        scale_out = _first_scales(scale_out, tokens)
    group = 0
    if quantize == "fp8_per_group":
        group, quantize = _group(_NAMES[pattern], block_quant_group_size, hidden, scale_out), None
    if quantize in ("nvfp4", "fp8_per_token") or group:
        options["scale_out"] = scale_out
    options |= {"quantize": quantize, "quant_out": quant_out}
    if experts is not None:
        results = comm._all_reduce_rms_norm_of_experts(FusedArguments(*rows_of, **options), algorithm, experts)
        return cast(torch.Tensor, options["norm_out"] if writes_norm else results.codes)
    if group:
        comm._internal.faults.check_usable()
        call = fused_call.checked(FusedArguments(*rows_of, **options), comm.device, group=group)
        comm._internal.run_fused(call, algorithm)
        return cast(torch.Tensor, call.quant_out if quant_out is None else quant_out)
    codes: torch.Tensor = comm.all_reduce_rms_norm_quantized(*rows_of, algorithm=algorithm, **options).codes
    return codes


def _group(name: str, size: Any, hidden: int, scale_out: Any) -> int:
    """The elements that share a scale in a pattern of groups."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or hidden % size:
        raise InvalidArgument(
            f"allreduce_fusion: {name}: block_quant_group_size={size!r}: a divisor of hidden={hidden} is needed"
        )
    if scale_out is None:
        raise InvalidArgument(f"allreduce_fusion: {name} needs a scale_out, int32 of packed exponents")
    return size


def _finalized(rows: Any, index: Any, weight: Any, shared: Any) -> ExpertRows:
    """The summands of the finalize patterns: `index[token, k]` is a row of the experts' output."""
    for name, tensor in (("input", rows), ("expanded_idx_to_permuted_idx", index)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
            raise InvalidArgument(f"allreduce_fusion: a MoE finalize pattern needs {name}, a tensor of two dimensions")
    return ExpertRows(rows, index, weight, shared, index.shape[1])


def _reduced(residual: Any, rows: Any, scales: Any, tokens: Any, experts: Any) -> ExpertRows:
    """The summands of kMoEReductionARResidualRMSNorm: rows and scales are in the order expert, token."""
    given = {
        "residual_in": residual,
        "moe_reduction_active_experts_token_input": rows,
        "moe_reduction_scale_input": scales,
        "moe_reduction_token_input": tokens,
    }
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous() or not tensor.dim():
            raise InvalidArgument(f"allreduce_fusion: kMoEReductionARResidualRMSNorm needs {name}, a contiguous tensor")
    hidden, count = residual.shape[-1], residual.shape[0]
    fits = not isinstance(experts, bool) and isinstance(experts, int) and experts >= 0
    if not fits or rows.numel() != experts * residual.numel() or scales.numel() != experts * count:
        raise InvalidArgument(
            f"allreduce_fusion: moe_reduction_device_num_experts={experts!r}, rows of shape {tuple(rows.shape)}, "
            f"scales of shape {tuple(scales.shape)}: [experts * tokens, hidden] and [experts, tokens] are needed for a "
            f"residual of shape {tuple(residual.shape)}"
        )
    return ExpertRows(rows.view(-1, hidden), None, scales.view(experts, count), tokens, experts)


def _layout(code: int | None) -> str:
    code = QuantizationSFLayout.SWIZZLED_128x4 if code is None else code
    if not isinstance(code, int) or code not in _LAYOUTS:
        raise InvalidArgument(
            f"allreduce_fusion: layout_code={code!r}: there is SWIZZLED_128x4 (0) and LINEAR (2), not SWIZZLED_8x4 (1)"
        )
    return _LAYOUTS[code]


def _first_bytes(scale_out: torch.Tensor | None, nbytes: int, hidden: int) -> torch.Tensor | None:
    """The part of a buffer for scales that a call needs. Returns the buffer unchanged if it is not larger, or invalid,
    so that the call refuses it."""
    if scale_out is None or not isinstance(scale_out, torch.Tensor) or hidden % NVFP4_BLOCK:
        return scale_out
    if scale_out.nbytes <= nbytes or not scale_out.is_contiguous():
        return scale_out
    return scale_out.view(-1).view(torch.uint8)[:nbytes]


def _first_scales(scale_out: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """The part of a buffer of per-token scales that a call needs, as [tokens, 1]. Returns the buffer unchanged if that
    is impossible, so that the call refuses it."""
    if not isinstance(scale_out, torch.Tensor) or scale_out.numel() < tokens or not scale_out.is_contiguous():
        return scale_out
    return scale_out.view(-1)[:tokens].view(tokens, 1)
