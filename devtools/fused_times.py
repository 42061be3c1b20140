"""Modelled savings of fusion: all-reduce, residual and RMSNorm in one kernel, compared with two separate kernels.

    python -m devtools.fused_times [--rows 1,2,4,8,16,32] [--hidden 8192] [--world-size 8] [--kept FILE]

All kernels are executed from their compiled code with the clock of `tricomm predict --from-code`, each with the
boundary to the kernel before it in a CUDA graph. The fused kernel is the one that a communicator chooses. The separate
norm is the usual one: a block per row, fp32 statistics by one sum. The separate all-reduce is the faster one of the LL
kernels. The type is bfloat16. Nothing is measured on a GPU.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import torch
import triton
import triton.language as tl

from devtools import kept_rows
from devtools.kept_rows import KeptRows, Row
from tricomm.errors import InvalidArgument
from tricomm.explorer.compiled.module_table import KernelLaunch
from tricomm.explorer.timing import from_code, row_times, timed_call
from tricomm.explorer.timing.recorded_launch import RecordingGpu
from tricomm.explorer.timing.timed_call import TimedArenas
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS, WIDE
from tricomm.perf import row_calls, text_table
from tricomm.perf.cost_model import machines
from tricomm.perf.cost_model.machines import LATENCIES, MACHINES, MachineSpec
from tricomm.perf.row_calls import RowForm

LABEL = "modelled from the compiled code, not measured"
BAR = 0.75


@triton.jit  # type: ignore[untyped-decorator]
def separate_norm(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, operands, SPEC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute residual_out (y_ptr) and the norm, one row per block, from sums in memory."""
    eps, bias, weight_ptr, residual_ptr, norm_ptr = operands
    lane = tl.arange(0, SPEC.BLOCK)
    inside = lane < SPEC.HIDDEN
    at = tl.program_id(0).to(tl.int64) * SPEC.HIDDEN + lane
    x = tl.load(x_ptr.to(tl.pointer_type(tl.bfloat16)) + at, mask=inside, other=0).to(tl.float32)
    x += tl.load(residual_ptr.to(tl.pointer_type(tl.bfloat16)) + at, mask=inside, other=0).to(tl.float32)
    weight = tl.load(weight_ptr.to(tl.pointer_type(tl.bfloat16)) + lane, mask=inside, other=0).to(tl.float32)
    rounded = x.to(tl.bfloat16)
    tl.store(y_ptr.to(tl.pointer_type(tl.bfloat16)) + at, rounded, mask=inside)
    x = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / SPEC.HIDDEN + eps)
    tl.store(
        norm_ptr.to(tl.pointer_type(tl.bfloat16)) + at, (x * factor * (weight + bias)).to(tl.bfloat16), mask=inside
    )


def fused(machine: MachineSpec, world_size: int, rows: int, form: RowForm) -> tuple[float, str]:
    """Microseconds of a fused call of bfloat16 by the kernel that a communicator would choose, and its name."""
    kernel = row_calls.chosen(machines.facts(machine, world_size), form, torch.bfloat16, rows)
    return row_times.predict(machine, kernel, world_size, rows, form, torch.bfloat16).time_us, kernel.name


def separate(machine: MachineSpec, rows: int, hidden: int) -> float:
    """Microseconds of the norm as a separate kernel."""
    block = 1 << (hidden - 1).bit_length()
    warps = max(1, min(16, block // 256))
    values = {
        "WORLD_SIZE": 1,
        "BLOCK": block,
        "LANES": 32 * warps,
        "PTX": True,
        "ELEMENT": "bfloat16",
        "HIDDEN": hidden,
        "OPERANDS": ("fp32", "fp32", *["*i16" + WIDE] * 3),
        **COMPILE_OPTIONS,
        "num_warps": warps,
        "maxnreg": 128,
    }
    arenas = TimedArenas(1, layout.plan(1, 1 << 20), rows * hidden // 4, rows * hidden // 4, False)
    operands = [arenas.new(2 * n, 0, "an operand") for n in (hidden, rows * hidden, rows * hidden)]

    def launch(gpu: RecordingGpu, rank: int) -> KernelLaunch:
        more = ((1e-6, 0.0, *operands),)
        arguments = (arenas.inputs[0], arenas.outputs[0], rows * hidden, timed_call.CALL, more)
        return gpu.launched(separate_norm, rows, values, 16, [], arenas.group(0), arguments)

    return LATENCIES[machine.name].boundary + timed_call.executed(machine, arenas, rows, launch).time_us


def alone(machine: MachineSpec, world_size: int, nbytes: int) -> tuple[float, str]:
    """Microseconds of the faster all-reduce by words with flags (`ll`, `ll128`), and its name."""
    kernels = [registry.find("all_reduce", algorithm, "ll") for algorithm in ("one_shot", "two_shot")]
    return min((from_code.predict(machine, kernel, world_size, nbytes).time_us, kernel.name) for kernel in kernels)


def ratio(machine: MachineSpec, world_size: int, rows: int, form: RowForm) -> float:
    """The time of the fused call divided by that of the separate kernels."""
    sums, _ = alone(machine, world_size, 2 * rows * form.hidden)
    return fused(machine, world_size, rows, form)[0] / (sums + separate(machine, rows, form.hidden))


@click.command()
@click.option("--rows", default="1,2,4,8,16,32", show_default=True, help="Numbers of rows.")
@click.option("--hidden", default=8192, show_default=True, help="Elements of a row.")
@click.option("--world-size", default=8, show_default=True)
@click.option("--gpu", default="h100", show_default=True)
@kept_rows.option
def main(rows: str, hidden: int, world_size: int, gpu: str, kept: Path | None) -> None:
    """Print modelled microseconds of the fused and of the unfused sequence."""
    try:
        file = KeptRows(kept)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
    machine, form = MACHINES[gpu], RowForm(hidden)
    table = []
    for count in (int(n) for n in rows.split(",")):
        name = f"{world_size} {gpu} {count} x {hidden}"
        click.echo(name, err=True)
        table.append(file.get(name, partial(_times, machine, world_size, count, form))["cells"])
    click.echo(f"# microseconds, {world_size} x {machine.name}, bfloat16, hidden {hidden}: {LABEL}")
    header = ("rows", "fused", "by", "all-reduce", "by", "norm", "fused/unfused", f"<= {BAR}")
    click.echo("\n".join(text_table.lines(header, table, right=("rows", "fused", "all-reduce", "norm"))))


def _times(machine: MachineSpec, world_size: int, count: int, form: RowForm) -> Row:
    one, kernel = fused(machine, world_size, count, form)
    sums, name = alone(machine, world_size, 2 * count * form.hidden)
    rest = separate(machine, count, form.hidden)
    saved = one / (sums + rest)
    cells = [f"{one:.2f}", kernel, f"{sums:.2f}", name, f"{rest:.2f}", f"{saved:.2f}"]
    return {"cells": [count, *cells, "yes" if saved <= BAR else "no"]}


if __name__ == "__main__":
    main()
