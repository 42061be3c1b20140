"""A call that goes to NCCL, as a launch plan: announced, counted, watched and bounded like a kernel's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tricomm.core import launch_plan, nccl
from tricomm.core.monitor import Monitor
from tricomm.core.nccl import Nccl
from tricomm.gpu import Gpu
from tricomm.kernels.launch.kernel_launch import Rows
from tricomm.policy import backend_choice, selection

Run = Callable[[Nccl, launch_plan.Asked, torch.Tensor, torch.Tensor, Rows], None]

# Of each collective: contiguous input x and output y, which are one where the collective works in place, and what goes
# where if rows are uneven.
TABLE: dict[str, Run] = {
    "all_reduce": lambda n, asked, x, y, rows: n.all_reduce(x, asked.op or "", y),
    "all_gather": lambda n, asked, x, y, rows: n.all_gather(x, y),
    "reduce_scatter": lambda n, asked, x, y, rows: n.reduce_scatter(x, y, asked.op or ""),
    "broadcast": lambda n, asked, x, y, rows: n.broadcast(y, asked.root),
    "reduce": lambda n, asked, x, y, rows: n.reduce(x, asked.root, asked.op or "", y),
    "gather": lambda n, asked, x, y, rows: n.gather(x, asked.root, y),
    "scatter": lambda n, asked, x, y, rows: n.scatter(x, asked.root, y),
    "all_to_all": lambda n, asked, x, y, rows: n.all_to_all(x, y),
    "all_to_all_v": lambda n, asked, x, y, rows: n.all_to_all_v(x, rows[0], rows[1], y),
    "barrier": lambda n, asked, x, y, rows: n.barrier(),
}


def make(
    there: Nccl, monitor: Monitor, gpu: Gpu | None, reason: str, asked: launch_plan.Asked, dtype: torch.dtype | None,
    mode: str, counter: list[int] | None,
) -> launch_plan.Plan:  # fmt: skip
    """Bind NCCL to what was asked. Raises `InvalidArgument` for a reduction that it has not.

    While a call runs, `monitor` counts its time and looks for peers that are gone, as for a user's own kernel.
    """
    op = asked.op or "none"
    if asked.collective not in backend_choice.REDUCTIONS:
        op = "none"
    elif dtype is not None:
        nccl.check(asked.collective, op, dtype)
    choice = selection.nccl(asked.collective, reason)
    name = str(dtype).removeprefix("torch.") if dtype is not None else "none"
    fingerprint, record = launch_plan.announced(choice, op, name, asked, mode)
    act = TABLE[asked.collective]

    def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: Rows = ()) -> None:
        with monitor.user_call(gpu):
            act(there, asked, x, y, rows)

    return launch_plan.Plan(choice, fingerprint, asked.count, record, run, [0] if counter is None else counter, mode)
