"""all_reduce + residual + RMSNorm + quantisation over a c10d group, of tricomm or of any other backend.

    checked -> the group's dispatcher -> the communicator's own fused call, if the call goes to the kernels
                                      -> Gloo's or NCCL's all-reduce, and torch

A group of another backend makes its own all-reduce, and torch does the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from tricomm.c10d.call_guard import guarded_call
from tricomm.c10d.group_calls import GroupCall
from tricomm.c10d.process_group import TricommGroup
from tricomm.c10d.torch_names import c10d
from tricomm.c10d.work_handles import FinishedWork
from tricomm.core.fused import fused_checks, unfused
from tricomm.core.fused.fused_call import FusedCall
from tricomm.core.fused.fused_checks import FusedArguments
from tricomm.errors import InvalidArgument


def run(group: Any, given: FusedArguments) -> FusedCall:
    """Make the call; its outputs are ready on a GPU in the current stream's order, on a CPU when this returns.

    Every rank of `group` calls it. Raises `InvalidArgument` before anything is sent, or the group's fault.
    """
    if not isinstance(given.x, torch.Tensor):
        raise InvalidArgument(f"all_reduce_rms_norm x: a torch.Tensor is needed, found {type(given.x).__name__}")
    call = fused_checks.checked(given, given.x.device)
    if call.x.numel():
        (_over_tricomm if isinstance(group, TricommGroup) else _over_another)(group, call)
    return call


@guarded_call
def _over_tricomm(group: TricommGroup, call: FusedCall) -> None:
    total = unfused.total_of(call)
    flat, out = call.x.view(-1), total.view(-1)
    made = GroupCall(
        "all_reduce", flat, out, "sum", async_op=False, count=flat.numel(), device=flat.device, fused=call,
        finish=lambda: unfused.finish(call, total),
    )  # fmt: skip

    def native() -> FinishedWork:
        _all_reduce(group._get_backend(flat.device), call, total)
        made.finish()
        return FinishedWork([])

    with torch.no_grad():
        group._dispatcher.run([made], native)


def _over_another(group: Any, call: FusedCall) -> None:
    total = unfused.total_of(call)
    with torch.no_grad():
        _all_reduce(group, call, total)
        unfused.finish(call, total)


def _all_reduce(backend: Any, call: FusedCall, total: torch.Tensor) -> None:
    """The sum into `total`, by a backend that works in place."""
    if total.data_ptr() != call.x.data_ptr():
        total.copy_(call.x)
    options = c10d.AllreduceOptions()
    options.asyncOp = False
    backend.allreduce([total], options).wait()
