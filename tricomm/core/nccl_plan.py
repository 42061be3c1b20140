"""A call that goes to NCCL, as a launch plan: announced, counted, watched and bounded like a kernel's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tricomm.core.launch_plan import LaunchPlan, Request, announced
from tricomm.core.monitor import Monitor
from tricomm.core.nccl import Nccl, check
from tricomm.gpu import Gpu
from tricomm.kernels.launch.kernel_launch import Rows
from tricomm.policy import backend_choice, selection

Run = Callable[[Nccl, Request, torch.Tensor, torch.Tensor, Rows], None]

# Of each collective: contiguous input x and output y, which are one if the collective works in place, and what goes
# where if rows are uneven.
TABLE: dict[str, Run] = {
    "all_reduce": lambda n, request, x, y, rows: n.all_reduce(x, request.op or "", y),
    "all_gather": lambda n, request, x, y, rows: n.all_gather(x, y),
    "reduce_scatter": lambda n, request, x, y, rows: n.reduce_scatter(x, y, request.op or ""),
    "broadcast": lambda n, request, x, y, rows: n.broadcast(y, request.root),
    "reduce": lambda n, request, x, y, rows: n.reduce(x, request.root, request.op or "", y),
    "gather": lambda n, request, x, y, rows: n.gather(x, request.root, y),
    "scatter": lambda n, request, x, y, rows: n.scatter(x, request.root, y),
    "all_to_all": lambda n, request, x, y, rows: n.all_to_all(x, y),
    "all_to_all_v": lambda n, request, x, y, rows: n.all_to_all_v(x, rows[0], rows[1], y),
    "barrier": lambda n, request, x, y, rows: n.barrier(),
}


def make(nccl: Nccl, monitor: Monitor, gpu: Gpu | None, reason: str, request: Request, mode: str) -> LaunchPlan:
    """Bind NCCL to what was asked. Raises `InvalidArgument` for a reduction that it has not.

    While a call runs, `monitor` counts its time and looks for peers that are gone, as for a user's own kernel.
    """
    op, dtype = request.op or "none", request.dtype
    if request.collective not in backend_choice.REDUCTIONS:
        op = "none"
    elif dtype is not None:
        check(request.collective, op, dtype)
    choice = selection.nccl(request.collective, reason)
    name = str(dtype).removeprefix("torch.") if dtype is not None else "none"
    fingerprint, record = announced(choice, op, name, request, mode)
    act = TABLE[request.collective]

    def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: Rows = ()) -> None:
        with monitor.user_call(gpu):
            act(nccl, request, x, y, rows)

    return LaunchPlan(choice, fingerprint, request.elements, record, run, mode)
