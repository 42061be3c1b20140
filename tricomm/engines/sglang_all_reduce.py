"""The object that SGLang uses as its custom all-reduce, over tricomm.

Can be imported without SGLang: the plugin passes SGLang's functions and classes.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tricomm.c10d.custom_ops import define
from tricomm.engines.engine_group import Engine, EngineGroup, open_group

# The functions of SGLang that the adapter uses, and the parameters that are passed by name.
FUNCTIONS = {
    "dispatch_custom_allreduce": ("group", "device"),
    "flashinfer_allreduce_residual_rmsnorm": (
        "input_tensor",
        "residual",
        "weight",
        "eps",
        "max_token_num",
        "use_oneshot",
        "trigger_completion_at_end",
        "fp32_acc",
        "use_attn_tp_group",
    ),
    "resolve_fusion_group": ("use_attn_tp_group",),
}

_members: weakref.WeakValueDictionary[str, SglangAllReduce] = weakref.WeakValueDictionary()


class SglangAllReduce:
    """`ca_comm` of one of SGLang's groups."""

    def __init__(self, group: EngineGroup, name: str) -> None:
        self.tricomm, self.name = group, name
        _members[name] = self

    @property
    def disabled(self) -> bool:
        """Whether SGLang runs every call; the same on all ranks."""
        return self.tricomm.comm is None

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether the kernels run this all_reduce; the same on all ranks."""
        return self.tricomm.takes("all_reduce", inp)

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """The sum over all ranks in a new tensor; None if SGLang has to make the call."""
        return self.tricomm.all_reduce(input) if self.should_custom_ar(input) else None

    def fused_allreduce_rmsnorm(
        self, input_: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(norm, new residual) of the sum over all ranks plus `residual`; None if SGLang has to make the call."""
        fits = residual.shape == input_.shape and residual.dtype == input_.dtype and weight.shape == input_.shape[-1:]
        if not fits or not self.tricomm.takes_rms_norm(input_, weight, eps):
            return None
        return self.tricomm.all_reduce_rms_norm(input_, residual, weight, eps)

    def capture(self) -> AbstractContextManager[None]:
        """A context manager around the capture of a CUDA graph. There is nothing to register, because the kernels'
        memory stays mapped."""
        return nullcontext()

    def close(self) -> None:
        """Leave the group; idempotent. SGLang only drops its reference."""
        self.tricomm.close()

    def __del__(self) -> None:
        self.close()


def dispatched(engine: Callable[[], Engine]) -> Callable[..., Any]:
    """A hook around SGLang's choice of a class: tricomm's class if all ranks can use it, else SGLang's."""

    def choose(own: Callable[..., Any], group: Any, device: torch.device) -> Callable[..., Any]:
        name = f"{getattr(group, 'group_desc', '')}/{getattr(group, 'group_name', '')}"
        opened = open_group(group, torch.device(device), name, engine())
        if opened.comm is None:
            return own(group=group, device=device)  # type: ignore[no-any-return]
        return lambda group, device: SglangAllReduce(opened, name)

    return choose


def fused(coordinator: Callable[..., Any]) -> Callable[..., Any]:
    """A hook around the fused call of SGLang's layers. `coordinator` is SGLang's `resolve_fusion_group`."""

    def call(
        own: Callable[..., Any],
        input_tensor: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> Any:
        # SGLang passes the other arguments by name; if not, this is an unknown version, and the hook does nothing.
        member = coordinator(use_attn_tp_group=options.get("use_attn_tp_group", True))[2].ca_comm if not more else None
        if not isinstance(member, SglangAllReduce):
            return own(input_tensor, residual, weight, *more, **options)
        eps = options.get("eps", 1e-6)
        if torch.compiler.is_compiling():
            return torch.ops.tricomm.sglang_all_reduce_rms_norm(input_tensor, residual, weight, eps, member.name)
        made = member.fused_allreduce_rmsnorm(input_tensor, residual, weight, eps)
        return own(input_tensor, residual, weight, **options) if made is None else made

    return call


def released(own: Callable[..., Any], updater: Any, *request: Any, **options: Any) -> Any:
    """A hook around SGLang's release of a server's memory, by all ranks together: also suspends tricomm's memory."""
    result = own(updater, *request, **options)
    for _, member in sorted(_members.items()):  # the same order on all ranks, which share several groups
        member.tricomm.suspend()
    return result


def taken_again(own: Callable[..., Any], updater: Any, *request: Any, **options: Any) -> Any:
    """A hook around SGLang's resumption, which may have several parts: resumes tricomm's memory with the last part."""
    result = own(updater, *request, **options)
    if not updater.offload_tags:
        for _, member in sorted(_members.items()):
            member.tricomm.resume()
    return result


def misfits(functions: dict[str, Callable[..., Any]]) -> list[str]:
    """The parameters that the adapter needs and SGLang's `functions` (by name) do not have; empty if they fit."""
    wrong = []
    for name, used in FUNCTIONS.items():
        parameters = inspect.signature(functions[name]).parameters
        wrong += [f"{name} has no parameter {parameter!r}" for parameter in used if parameter not in parameters]
        needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        wrong += [f"{name} needs the parameter {parameter!r}" for parameter in needed if parameter not in used]
    return wrong


def _compiled(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator of a compiled graph, which cannot change its route: calls that the kernels do not support use
    SGLang's functions."""
    member = _members[name]
    made = member.fused_allreduce_rmsnorm(x, residual, weight, eps)
    if made is not None:
        return made
    from sglang.srt.distributed import parallel_state

    total = next(g for ref in parallel_state._groups.values() if (g := ref()) is not None and g.ca_comm is member)
    added = (total.all_reduce(x.clone()) + residual).contiguous()
    return torch.nn.functional.rms_norm(added, added.shape[-1:], weight.to(added.dtype), eps), added


define(
    "sglang_all_reduce_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str name) -> (Tensor, Tensor)",
    _compiled,
    lambda x, residual, weight, eps, name: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(residual, memory_format=torch.contiguous_format),
    ),
)
