"""`torch.ops.tricomm.*`: collectives that `torch.compile(fullgraph=True)` keeps in the graph, differentiable.

All but `all_reduce_` are out of place; `group` is the `group_name` of a group, of tricomm or of any other backend.
Gradients are of the sum of all ranks' losses: the backward of an all_reduce is an all_reduce, of an all_gather a
reduce_scatter, and so on. Defined with `Library`, because `@custom_op` costs 30 us a call.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake

from tricomm import arguments, env
from tricomm.c10d.call_guard import guarded_call
from tricomm.c10d.group_calls import GroupCall
from tricomm.c10d.process_group import TricommGroup
from tricomm.c10d.torch_names import c10d
from tricomm.c10d.work_handles import FinishedWork
from tricomm.core.fused import fused_call, unfused
from tricomm.core.fused.expert_rows import ExpertRows
from tricomm.core.fused.fused_call import Epilogue, FusedArguments, FusedCall, scale_shape
from tricomm.errors import InvalidArgument
from tricomm.torch_hook import when

_lib = Library("tricomm", "DEF")
_defined: list[str] = []
_TAGS = (torch.Tag.pt2_compliant_tag,)
_OPS = {ours: getattr(c10d.ReduceOp, theirs) for theirs, ours in arguments.REDUCE_OPS.items()}


def _group(name: str) -> Any:
    return c10d._resolve_process_group(name)


def _reducing_group(name: str) -> Any:
    """The group of that name, for a reduction. With TRICOMM_BATCH_INVARIANT raises `InvalidArgument` for a group of
    another backend."""
    group = _group(name)
    if not isinstance(group, TricommGroup) and env.batch_invariant():
        raise InvalidArgument(
            f"torch.ops.tricomm: TRICOMM_BATCH_INVARIANT is set, and group {name!r} is of another backend, whose order "
            "of reduction may depend on the size; use the group that tricomm.wrap(group) returns"
        )
    return group


def _options(kind: Any, **values: Any) -> Any:
    options = kind()
    options.asyncOp = False
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _op(name: str) -> Any:
    if name not in _OPS:
        raise InvalidArgument(f"op={name!r} is not supported; there is {', '.join(_OPS)}")
    return _OPS[name]


def _all_reduce_(x: torch.Tensor, op: str, group: str) -> None:
    """Returns nothing, because a compiler keeps an operator that mutates its input in the graph, but not one that also
    returns it."""
    _reducing_group(group).allreduce([x], _options(c10d.AllreduceOptions, reduceOp=_op(op))).wait()


def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    _all_reduce_(out, op, group)
    return out


def _broadcast(x: torch.Tensor, src: int, group: str) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    _group(group).broadcast([out], _options(c10d.BroadcastOptions, rootRank=src)).wait()
    return out


def _rows(x: torch.Tensor, multiplier: int, divisor: int, what: str) -> torch.Tensor:
    """An output like `x`, with dimension 0 scaled."""
    if x.dim() == 0 or x.shape[0] % divisor:
        raise InvalidArgument(f"{what}: shape {tuple(x.shape)}: dimension 0 must be a multiple of {divisor} ranks")
    return x.new_empty((x.shape[0] * multiplier // divisor, *x.shape[1:]))


def _all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    members = _group(group)
    out = _rows(x, members.size(), 1, "all_gather")
    _single(members, "all_gather_single", "_allgather_base")(
        out, x.contiguous(), _options(c10d.AllgatherOptions)
    ).wait()
    return out


def _reduce_scatter(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    members = _reducing_group(group)
    out = _rows(x, 1, members.size(), "reduce_scatter")
    options = _options(c10d.ReduceScatterOptions, reduceOp=_op(op))
    _single(members, "reduce_scatter_single", "_reduce_scatter_base")(out, x.contiguous(), options).wait()
    return out


def _all_to_all(x: torch.Tensor, out_splits: list[int], in_splits: list[int], group: str) -> torch.Tensor:
    out = x.new_empty((sum(out_splits), *x.shape[1:]))
    call = _single(_group(group), "all_to_all_single", "alltoall_base")
    call(out, x.contiguous(), out_splits, in_splits, _options(c10d.AllToAllOptions)).wait()
    return out


def _single(group: Any, new: str, old: str) -> Any:
    return getattr(group, new, None) or getattr(group, old)


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def define(schema: str, run: Any, fake: Any) -> None:
    """Add an operator to `torch.ops.tricomm`: `run` makes the call, `fake` its outputs in a trace."""
    _lib.define(schema, tags=_TAGS)
    name = schema.partition("(")[0]
    _defined.append(name)
    _lib.impl(name, run, "CPU")
    _lib.impl(name, run, "CUDA")
    register_fake(f"tricomm::{name}", fake, lib=_lib)


define("all_reduce_(Tensor(a!) x, str op, str group) -> ()", _all_reduce_, lambda x, op, group: None)
define("all_reduce(Tensor x, str op, str group) -> Tensor", _all_reduce, _like)
define("broadcast(Tensor x, int src, str group) -> Tensor", _broadcast, _like)
define(
    "all_gather(Tensor x, str group) -> Tensor",
    _all_gather,
    lambda x, group: _rows(x, _group(group).size(), 1, "all_gather"),
)
define(
    "reduce_scatter(Tensor x, str op, str group) -> Tensor",
    _reduce_scatter,
    lambda x, op, group: _rows(x, 1, _group(group).size(), "reduce_scatter"),
)
define(
    "all_to_all(Tensor x, SymInt[] out_splits, SymInt[] in_splits, str group) -> Tensor",
    _all_to_all,
    lambda x, out_splits, in_splits, group: x.new_empty((sum(out_splits), *x.shape[1:])),
)


# all_reduce + RMSNorm (+ quantisation): for inference, not differentiable
#
#   checked -> the group's dispatcher -> the communicator's fused call, if that is the route
#                                     -> all-reduce over messages or NCCL, then torch
# A group of another backend does the all-reduce, and torch the rest. `rms_norm` and its quantising forms reduce
# nothing: torch computes the rest from x, with the bits of a fused call. The forms `_of_experts`
# sum experts' rows first: in the kernel, or by torch into x.


def run_fused(group: Any, given: FusedArguments, experts: ExpertRows | None = None) -> FusedCall:
    """Make the call. On a GPU its outputs are ready in the order of the current stream, on a CPU when this returns.

    Every rank of `group` calls it; with None nothing is reduced. With `experts`, x is memory for the rows.
    Raises `InvalidArgument` before anything is sent, or the group's fault.
    """
    if not isinstance(given.x, torch.Tensor):
        raise InvalidArgument(f"all_reduce_rms_norm x: a torch.Tensor is needed, found {type(given.x).__name__}")
    call = fused_call.checked(given, given.x.device, experts)
    if call.x.numel() and group is None:
        with torch.no_grad():
            unfused.finish(call, call.x)
    elif call.x.numel():
        (_over_tricomm if isinstance(group, TricommGroup) else _over_another)(group, call)
    return call


@guarded_call
def _over_tricomm(group: TricommGroup, call: FusedCall) -> None:
    total = unfused.total_of(call)
    flat, out = call.x.view(-1), total.view(-1)
    made = GroupCall(
        "all_reduce",
        flat,
        out,
        "sum",
        async_op=False,
        count=flat.numel(),
        device=flat.device,
        fused=call,
        prepare=lambda: _sum_experts(call),
        finish=lambda: unfused.finish(call, total),
    )

    def native() -> FinishedWork:
        _all_reduce_into(group._get_backend(flat.device), call, total)
        made.finish()
        return FinishedWork([])

    with torch.no_grad():
        group._dispatcher.run([made], native)


def _over_another(group: Any, call: FusedCall) -> None:
    total = unfused.total_of(call)
    with torch.no_grad():
        _all_reduce_into(group, call, total)
        unfused.finish(call, total)


def _all_reduce_into(backend: Any, call: FusedCall, total: torch.Tensor) -> None:
    """Write the sum to `total`, by a backend that works in place."""
    _sum_experts(call)
    if total.data_ptr() != call.x.data_ptr():
        total.copy_(call.x)
    options = c10d.AllreduceOptions()
    options.asyncOp = False
    backend.allreduce([total], options).wait()


def _sum_experts(call: FusedCall) -> None:
    if call.experts is not None:
        call.x.copy_(call.experts.summed(call.x))


_NORM = "Tensor weight, float eps, float weight_bias"
_FUSED = f"Tensor x, Tensor? residual, {_NORM}"
_EXPERTS = f"Tensor rows, Tensor places, Tensor? expert_weight, Tensor? shared, Tensor residual, {_NORM}"


def _define_fused(suffix: str, more: tuple[str, ...], quantize: str | None, *results: str) -> None:
    """Add `all_reduce_rms_norm{suffix}`, `all_reduce_rms_norm{suffix}_of_experts` and `rms_norm{suffix}`, with the
    further arguments `more`; they return the outputs of a `FusedCall` that belong to `quantize`."""

    def run(
        group: Any, x: torch.Tensor, residual: torch.Tensor | None, *given: Any, experts: ExpertRows | None = None
    ) -> Any:
        weight, eps, bias, *rest = given
        options: dict[str, Any] = dict(zip(more, rest, strict=True))
        residual = None if residual is None else residual.contiguous()
        asked = FusedArguments(x.contiguous(), residual, weight.contiguous(), eps, bias, quantize=quantize, **options)
        call = run_fused(group, asked, experts)
        return tuple(getattr(call, name).view(_form(name, x, call.epilogue)[0]) for name in results)

    def fake(x: torch.Tensor, *given: Any) -> Any:
        layout = given[4 + more.index("scale_layout")] if "scale_layout" in more else ""
        epilogue = Epilogue(x.shape[-1], x.dtype, 0.0, quantize=quantize, scale_layout=layout)
        forms = [_form(name, x, epilogue) for name in results]
        return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in forms)

    def of_experts(*given: Any) -> Any:
        summands: list[Any] = [None if t is None else t.contiguous() for t in given[:4]]
        rows, places, weight, shared = summands
        residual, group = given[4], _reducing_group(given[-1])
        experts = ExpertRows(rows, places, weight, shared, places.shape[-1] if places.dim() else 0)
        return run(group, _like(residual), residual, *given[5:-1], experts=experts)

    further = "".join(f", {_TYPES[name]} {name}" for name in more)
    returned = f"({', '.join(['Tensor'] * len(results))})"
    define(
        f"all_reduce_rms_norm{suffix}({_FUSED}{further}, str group) -> {returned}",
        lambda *given: run(_reducing_group(given[-1]), *given[:-1]),
        fake,
    )
    define(
        f"all_reduce_rms_norm{suffix}_of_experts({_EXPERTS}{further}, str group) -> {returned}",
        of_experts,
        lambda *given: fake(given[4], *given[4:]),
    )
    define(f"rms_norm{suffix}({_FUSED}{further}) -> {returned}", partial(run, None), fake)


def _form(result: str, x: torch.Tensor, epilogue: Epilogue) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of a result."""
    *rows, hidden = x.shape
    match result, epilogue.quantize:
        case "scale_out", "nvfp4":
            return scale_shape(x.numel() // hidden, hidden, epilogue.scale_layout), torch.uint8
        case "scale_out", _:
            return (*rows, 1), torch.float32
        case "quant_out", "nvfp4":
            return (*rows, hidden // 2), torch.uint8
        case "quant_out", _:
            return (*rows, hidden), torch.float8_e4m3fn
    return (*rows, hidden), x.dtype


_TYPES = {"scale": "Tensor", "scale_layout": "str"}
_define_fused("", (), None, "norm_out", "residual_out")
_define_fused("_fp8", ("scale",), "fp8", "quant_out", "residual_out")
_define_fused("_fp8_per_token", (), "fp8_per_token", "quant_out", "scale_out", "residual_out")
_define_fused("_nvfp4", ("scale", "scale_layout"), "nvfp4", "quant_out", "scale_out", "residual_out")


def _realize_operands() -> None:
    """Make Inductor write the operands of these operators to memory, rounded, before other nodes read them. By default
    it does so only from the second time that it meets an operator, so bits would depend on earlier compilations."""
    ops = [getattr(torch.ops.tricomm, name).default for name in _defined]
    import_module("torch._inductor.lowering").add_needs_realized_inputs(ops)


when("torch._inductor.lowering", _realize_operands, "compiled torch.ops.tricomm may read operands unrounded")


# Gradients


def _keep_op(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.op, ctx.group = inputs
    if ctx.op not in ("sum", "avg"):
        raise InvalidArgument(f"op={ctx.op!r} has no gradient over ranks; use sum or avg, or detach the tensor")


def _all_reduce_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tricomm.all_reduce(grad, ctx.op, ctx.group), None, None


def _reduce_scatter_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    full = torch.ops.tricomm.all_gather(grad, ctx.group)
    return full / _group(ctx.group).size() if ctx.op == "avg" else full, None, None


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group = inputs[-1]


def _all_gather_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tricomm.reduce_scatter(grad, "sum", ctx.group), None


def _keep_source(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.src, ctx.group = inputs


def _broadcast_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    total = torch.ops.tricomm.all_reduce(grad, "sum", ctx.group)
    return total if _group(ctx.group).rank() == ctx.src else torch.zeros_like(total), None, None


def _keep_splits(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.out_splits, ctx.in_splits, ctx.group = inputs


def _all_to_all_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tricomm.all_to_all(grad, ctx.in_splits, ctx.out_splits, ctx.group), None, None, None


register_autograd("tricomm::all_reduce", _all_reduce_back, setup_context=_keep_op, lib=_lib)
register_autograd("tricomm::reduce_scatter", _reduce_scatter_back, setup_context=_keep_op, lib=_lib)
register_autograd("tricomm::all_gather", _all_gather_back, setup_context=_keep_group, lib=_lib)
register_autograd("tricomm::broadcast", _broadcast_back, setup_context=_keep_source, lib=_lib)
register_autograd("tricomm::all_to_all", _all_to_all_back, setup_context=_keep_splits, lib=_lib)
