"""FlashInfer's fused all-reduce, by its names, arguments and pattern numbers, over tricomm.

    import tricomm.flashinfer as comm              # in place of: import flashinfer.comm as comm

    workspace = comm.create_allreduce_fusion_workspace("auto", world_size, rank, max_token_num, hidden, dtype)
    comm.allreduce_fusion(x, workspace, comm.AllReduceFusionPattern.kARResidualRMSNorm, residual_in=residual, ...)
    workspace.destroy()

It also runs on CPUs. Differences: `workspace.backend` is "tricomm"; arguments that tune FlashInfer's own kernels
(`launch_with_pdl`, `trigger_completion_at_end`, `fp32_acc`: sums are always in fp32) change nothing; a buffer for
scales may be larger than needed; the sum of experts' rows is rounded once. Per-token-group patterns (8, 9) are refused
by name, as is the layout SWIZZLED_8x4. Names and meanings are those of FlashInfer 0.7.2.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from tricomm.communicator import Communicator
from tricomm.core.bootstrap import pick_device
from tricomm.core.fused import fused_call
from tricomm.core.fused.expert_rows import ExpertRows
from tricomm.core.fused.fused_call import DTYPES, NVFP4_BLOCK, FusedArguments, scale_shape
from tricomm.errors import InvalidArgument

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "QuantizationSFLayout",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
]

_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


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
    """Where NVFP4's block scales are, by number."""

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
    _Pattern.kARResidualRMSNormDynamicFP8Quant: ("fp8_per_token", False),
    _Pattern.kARResidualRMSNormOutDynamicFP8Quant: ("fp8_per_token", True),
    _Pattern.kMoEReductionARResidualRMSNorm: (None, True),  # nvfp4, if there is a quant_out
    _Pattern.kMoEFinalizeARResidualRMSNorm: (None, True),
    _Pattern.kMoEFinalizeARResidualRMSNormFP8Quant: ("fp8", False),
}
_SUPPORTED = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_LAYOUTS = {QuantizationSFLayout.SWIZZLED_128x4: "swizzled_128x4", QuantizationSFLayout.LINEAR: "linear"}


class AllReduceFusionWorkspace:
    """A communicator, and the size of the largest call. Made by `create_allreduce_fusion_workspace`.

    `rank` and `world_size` are the group's; `comm` is the communicator, whose `explain` and `stats` say what ran.
    """

    backend = "tricomm"

    def __init__(
        self, comm: Communicator, max_token_num: int, hidden_dim: int, dtype: torch.dtype, owned: bool
    ) -> None:
        self.comm, self.world_size, self.rank = comm, comm.world_size, comm.rank
        self.max_token_num, self.hidden_dim, self.dtype = max_token_num, hidden_dim, dtype
        self._owned, self._destroyed = owned, False

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: Any = None
    ) -> bool:
        """Whether a call of this shape and type fits: it has at most the bytes that the workspace was made for."""
        return self._why_not(tp_size, num_tokens, hidden_dim, dtype) is None

    def _why_not(self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> str | None:
        if self._destroyed:
            return "it was destroyed"
        if tp_size != self.world_size:
            return f"it is of {self.world_size} ranks, not {tp_size}"
        if dtype not in DTYPES:
            return f"there is {_SUPPORTED}, not {dtype}"
        most = self.max_token_num * self.hidden_dim * self.dtype.itemsize
        nbytes = num_tokens * hidden_dim * dtype.itemsize
        if nbytes > most:
            return f"{num_tokens} tokens of {hidden_dim} {dtype} are {nbytes} bytes, it was made for {most}"
        return None

    def destroy(self) -> None:
        """Close the communicator, unless it was the caller's. Idempotent."""
        if not self._destroyed and self._owned:
            self.comm.close()
        self._destroyed = True


def create_allreduce_fusion_workspace(
    backend: Literal["trtllm", "mnnvl", "mnnvl-cutedsl", "auto"] = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: Any = None,
    *,
    top_k: int | None = None,
    rms_eps: float | None = None,
    weight_bias: float | None = None,
    routed_scaling_factor: float | None = None,
    include_shared_expert: bool | None = None,
    add_residual: bool | None = None,
    write_residual_output: bool | None = None,
    apply_rms_norm: bool | None = None,
    output_dtype: torch.dtype | None = None,
    dynamic_fp8: bool | None = None,
    write_norm_output: bool | None = None,
    config: Any = None,
) -> AllReduceFusionWorkspace:
    """A workspace over the ranks of `group`; all of them call it.

    `group` is a process group of torch.distributed (default: all ranks), or a `tricomm.Communicator`, which is used as
    it is and stays the caller's. A call may have up to `max_token_num * hidden_dim` elements of `dtype`. `world_size`
    and `rank` have to be the group's if they are given. The backends "auto", "trtllm" and "mnnvl" are the same here;
    "mnnvl-cutedsl" is refused, and so are the keyword-only arguments, which are its own. Others change nothing here.

    Raises `InvalidArgument` (a `ValueError`) for arguments that do not fit, and otherwise as `Communicator` does.
    """
    special = {
        "top_k": top_k,
        "rms_eps": rms_eps,
        "weight_bias": weight_bias,
        "routed_scaling_factor": routed_scaling_factor,
        "include_shared_expert": include_shared_expert,
        "add_residual": add_residual,
        "write_residual_output": write_residual_output,
        "apply_rms_norm": apply_rms_norm,
        "output_dtype": output_dtype,
        "dynamic_fp8": dynamic_fp8,
        "write_norm_output": write_norm_output,
        "config": config,
    }
    given = [name for name, value in special.items() if value is not None]
    if backend not in ("auto", "trtllm", "mnnvl") or given:
        more = f" with {', '.join(given)}" if given else ""
        raise InvalidArgument(
            f"create_allreduce_fusion_workspace: backend={backend!r}{more}: tricomm stands for auto, trtllm and mnnvl, "
            "which take no settings of mnnvl-cutedsl"
        )
    for name, size in (("max_token_num", max_token_num), ("hidden_dim", hidden_dim)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"create_allreduce_fusion_workspace: {name}={size!r}: 1 or more is needed")
    if dtype not in DTYPES:
        raise InvalidArgument(f"create_allreduce_fusion_workspace: dtype={dtype!r}; there is {_SUPPORTED}")
    assert max_token_num is not None and hidden_dim is not None and dtype is not None, "they were looked at"
    if isinstance(group, Communicator):
        _check_place(group.rank, group.world_size, rank, world_size)
        return AllReduceFusionWorkspace(group, max_token_num, hidden_dim, dtype, owned=False)
    return AllReduceFusionWorkspace(_over(group, rank, world_size), max_token_num, hidden_dim, dtype, owned=True)


def _over(group: Any, rank: int | None, world_size: int | None) -> Communicator:
    """A communicator of the ranks of a process group, on this rank's own GPU, or on the CPU."""
    group = dist.group.WORLD if group is None else group
    known = None if group is None else distributed_c10d._world.pg_map.get(group)
    if group is None or known is None or known[1] is None:
        raise InvalidArgument(
            "create_allreduce_fusion_workspace: torch.distributed has not made this group here; call "
            "init_process_group first, and on members only, or pass a tricomm.Communicator"
        )
    _check_place(group.rank(), group.size(), rank, world_size)
    count = _counts[group] = _counts.get(group, 0) + 1
    store = PrefixStore(f"tricomm/flashinfer/{count}", known[1])
    return Communicator(store, group.rank(), group.size(), pick_device(None))


def _check_place(own: int, size: int, rank: int | None, world_size: int | None) -> None:
    if rank not in (None, own) or world_size not in (None, size):
        raise InvalidArgument(
            f"create_allreduce_fusion_workspace: rank={rank}, world_size={world_size}; this is rank {own} of {size} in "
            "the group that was given"
        )


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
    `Communicator.all_reduce_rms_norm` and its quantising form: `scale_factor` divides for FP8 and multiplies for
    NVFP4; `norm_out` is not written by a quantising pattern without `Out`. The MoE patterns make one row for each row
    of `residual_in`. kMoEReductionARResidualRMSNorm takes scales expert by expert; with a `quant_out` it is NVFP4.
    Raises `InvalidArgument` (a `ValueError`) for a pattern that is not covered, a workspace that is too small or
    destroyed, and tensors that do not fit; or the group's fault.
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
        experts = _finalized(input, expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output)
    if experts is not None:
        if output is not None or (pattern == _Pattern.kMoEFinalizeARResidualRMSNorm and quant_out is not None):
            name = "output" if output is not None else "quant_out"
            raise InvalidArgument(f"allreduce_fusion: {_NAMES[pattern]} writes no {name}; leave it out")
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
    if quantize in ("nvfp4", "fp8_per_token"):
        options["scale_out"] = scale_out
    options |= {"quantize": quantize, "quant_out": quant_out}
    if experts is not None:
        comm._internal.faults.check_usable()
        call = fused_call.checked(FusedArguments(*rows_of, **options), comm.device, experts)
        comm._internal.run_fused(call, algorithm)
        given: Any = options["norm_out"] if writes_norm else quant_out
        result: Any = call.quant_out if given is None else given
        return cast(torch.Tensor, result)
    codes: torch.Tensor = comm.all_reduce_rms_norm_quantized(*rows_of, algorithm=algorithm, **options).codes
    return codes


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
    """The part of a buffer for scales that a call needs; the buffer itself if it is no larger, or will be refused."""
    if scale_out is None or not isinstance(scale_out, torch.Tensor) or hidden % NVFP4_BLOCK:
        return scale_out
    if scale_out.nbytes <= nbytes or not scale_out.is_contiguous():
        return scale_out
    return scale_out.view(-1).view(torch.uint8)[:nbytes]


def _first_scales(scale_out: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """The part of a buffer of per-token scales that a call needs, as [tokens, 1]; the buffer itself if that does not
    work, to be refused later."""
    if not isinstance(scale_out, torch.Tensor) or scale_out.numel() < tokens or not scale_out.is_contiguous():
        return scale_out
    return scale_out.view(-1)[:tokens].view(tokens, 1)
