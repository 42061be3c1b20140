"""The modelled time of a fused all-reduce from its compiled code, as `from_code` for a plain one.

A block processes whole rows, so a round is a row of each block. Long calls are executed in part, by the same rules.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from tricomm.core import launch_plan
from tricomm.explorer.compiled.module_table import KernelLaunch
from tricomm.explorer.timing import from_code, timed_call
from tricomm.explorer.timing.from_code import CodeTime, Division
from tricomm.explorer.timing.recorded_launch import RecordingGpu
from tricomm.explorer.timing.timed_call import CALL, LaunchShape, TimedArenas, TimedCall
from tricomm.kernels import layout
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.layout import Layout
from tricomm.kernels.specialization import specialized
from tricomm.perf import row_calls
from tricomm.perf.cost_model import machines
from tricomm.perf.cost_model.machines import MachineSpec
from tricomm.perf.row_calls import RowForm, RowLaunch


def predict(
    machine: MachineSpec,
    kernel: Kernel,
    world_size: int,
    rows: int,
    form: RowForm,
    dtype: torch.dtype,
    shape: LaunchShape | None = None,
) -> CodeTime:
    """The time of a call with `rows` rows per rank, in a graph, with tensors in L2. A `shape` of None is the policy's.

    Raises `InvalidArgument` if the kernel does not take such rows.
    """
    bound = _bound(machine, kernel, world_size, rows, form, dtype, shape)
    choice, plan = bound.choice, layout.plan(world_size, machines.ARENA_BYTES)
    blocks = min(choice.blocks, rows)
    room = plan.buffer_words(kernel.algorithm, kernel.protocol, kernel.collective) // _pitch(bound)
    launch = LaunchShape(choice.blocks, choice.warps, choice.block, dependent=bound.constexprs["DEPENDENT"])
    cut = Division(launch, plan, blocks, -(-rows // room), room / blocks, room / blocks)

    def call(chunks: int, rounds: float, plan: Layout) -> TimedCall:
        part = min(rows, int(chunks * rounds * blocks))
        return run(machine, kernel, world_size, part, form, dtype, launch, plan)

    return from_code.extended(machine, cut, rows, call)


@lru_cache(256)
def run(
    machine: MachineSpec,
    kernel: Kernel,
    world_size: int,
    rows: int,
    form: RowForm,
    dtype: torch.dtype,
    shape: LaunchShape | None,
    plan: Layout,
) -> TimedCall:
    """Execute a call of `rows` rows, in arenas with the layout `plan`."""
    bound = _bound(machine, kernel, world_size, rows, form, dtype, shape)
    arenas = TimedArenas(world_size, plan, 0, 0, False)
    calls = [
        row_calls.call(form, rows, dtype, partial(arenas.new, rank=rank, name="a tensor")) for rank in range(world_size)
    ]

    def launch(gpu: RecordingGpu, rank: int) -> KernelLaunch:
        x, y = calls[rank].x, calls[rank].residual_out
        more = (launch_plan.operands(calls[rank]),)
        return gpu.launched(
            bound.function,
            bound.choice.blocks,
            bound.constexprs,
            bound.bits,
            [],
            arenas.group(rank),
            (x, y, x.numel(), CALL, more),
        )

    return timed_call.executed(machine, arenas, timed_call.busy(rows, bound.choice.blocks), launch)


def _bound(
    machine: MachineSpec,
    kernel: Kernel,
    world_size: int,
    rows: int,
    form: RowForm,
    dtype: torch.dtype,
    shape: LaunchShape | None,
) -> RowLaunch:
    launched = (shape.blocks, shape.warps, shape.tile) if shape is not None else None
    return row_calls.launched(machines.facts(machine, world_size), kernel, form, dtype, rows, launched)


def _pitch(bound: RowLaunch) -> int:
    """The number of words of a mailbox that a row, or a shard of a row, takes."""
    pitch: int = specialized(("SPEC",), bound.constexprs)["SPEC"].PITCH
    return pitch
