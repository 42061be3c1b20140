"""`tricomm predict`: the cost model's times of every kernel of a collective over sizes, and which should win."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.left_out import left_out_lines
from tricomm.perf import parsing, row_calls, text_table, units
from tricomm.perf.cost_model import kernel_time, machines
from tricomm.perf.cost_model.kernel_time import TimeShares
from tricomm.perf.cost_model.machines import MachineSpec
from tricomm.perf.row_calls import RowForm

ROW_TYPE = torch.bfloat16  # of fused calls
_FORM = RowForm()
LABEL = "predicted by a cost model, not measured"
_NUMBERS = ("size (B)", "time (us)", "busbw (GB/s)", "limit (us)", "waits")
_HEADER = (_NUMBERS[0], "kernel", *_NUMBERS[1:], "limited by", "")


@dataclass(frozen=True)
class ForecastRow:
    """One kernel at one size: `size_bytes` as nccl-tests counts it, `limit_us` a lower bound for any kernel, `limit`
    what limits this one (`limits`)."""

    collective: str
    size_bytes: int
    algorithm: str
    protocol: str
    time_us: float
    waits_us: float
    wire_us: float
    busbw_gbs: float
    limit_us: float
    shares_us: TimeShares
    limit: str
    best: bool


@dataclass(frozen=True)
class Forecast:
    """Rows of every kernel and size on `world_size` GPUs of `machine`. `left_out`: by kernel, why these GPUs, or this
    Triton for them, don't have it, or why it does not take such rows."""

    machine: MachineSpec
    world_size: int
    mode: str
    rows: list[ForecastRow]
    left_out: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        facts = {"schema": 1, "predicted": True, "machine": asdict(self.machine), "left_out": self.left_out}
        return {**facts, "ranks": self.world_size, "mode": self.mode, "results": [asdict(row) for row in self.rows]}

    def lines(self) -> list[str]:
        """A table for people, with * at the fastest kernel of a size."""
        m = self.machine
        lines = [
            f"# {self.world_size} x {m.name}, {self.mode} mode; {LABEL}",
            f"# links {m.links:g} GB/s usable, hop {m.hop:g} us, barrier {m.barrier:g} us, launch {m.launch:g} us",
        ]
        for collective in dict.fromkeys(row.collective for row in self.rows):
            cells = [_cells(row) for row in self.rows if row.collective == collective]
            lines += ["#", f"# {collective}", *text_table.lines(_HEADER, cells, right=_NUMBERS)]
        return lines + footer(self.left_out)


def footer(reasons: dict[str, str]) -> list[str]:
    """The lines below the tables that say why kernels are left out."""
    lines = [f"# {line}" for line in left_out_lines(reasons.items())]
    return ["#", *lines] if lines else []


def _cells(row: ForecastRow) -> tuple[str, ...]:
    times = (f"{row.time_us:.1f}", f"{row.busbw_gbs:.1f}", f"{row.limit_us:.2f}", f"{row.waits_us / row.time_us:.0%}")
    best = "*" if row.best else ""
    return str(row.size_bytes), f"{row.algorithm}/{row.protocol}", *times, row.shares_us.text(), best


def forecast(gpu: str, world_size: int, collective: str, sizes: str, mode: str, form: RowForm = _FORM) -> Forecast:
    """The times of every kernel of a comma list of collectives; an all_reduce_rms_norm has rows of `form`.

    Raises `InvalidArgument` with the nearest names, and for rows that no fused kernel takes.
    """
    machine = kernel_time.find(gpu)
    wanted = parsing.parse_sizes(sizes)
    calls = [call for name in names(collective) for call in asked(machine, world_size, name, wanted, form)]
    rows = [row for call in calls for row in _at(machine, world_size, call, mode)]
    return Forecast(machine, world_size, mode, rows, missing(machine, world_size, calls))


def missing(machine: MachineSpec, world_size: int, calls: Sequence[AskedCall]) -> dict[str, str]:
    """By name, why kernels of the collectives of `calls` are left out."""
    reasons: dict[str, str] = {}
    for collective in dict.fromkeys(call.collective for call in calls):
        reasons |= kernel_time.left_out(machine, collective, world_size)
    rows = {name: reason for call in calls for name, reason in call.left_out.items() if name not in reasons}
    return reasons | rows


def names(collectives: str) -> tuple[str, ...]:
    """The collectives of a comma list; `all` excludes the fused ones, whose sizes are those of an all-reduce."""
    known = units.DATA_COLLECTIVES if collectives == "all" else (*units.DATA_COLLECTIVES, FUSED)
    return parsing.parse_names(collectives, known, "collective")


@dataclass(frozen=True)
class AskedCall:
    """One size: `size_bytes` as nccl-tests counts it, `nbytes` of input a rank; `rows` of a fused call, else 0.
    `left_out`: by name, why kernels do not take such rows."""

    name: str
    collective: str
    size_bytes: int
    nbytes: int
    kernels: tuple[Kernel, ...]
    rows: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def asked(
    machine: MachineSpec, world_size: int, name: str, sizes: tuple[int, ...], form: RowForm, itemsize: int = 1
) -> list[AskedCall]:
    """The calls of a collective at `sizes`, of elements of `itemsize`, with the kernels that such GPUs have."""
    if name != FUSED:
        kernels = tuple(kernel_time.kernels(machine, name, world_size))
        counts = [units.row_elements(name, size, itemsize, world_size) for size in sizes]
        return [
            AskedCall(
                name,
                name,
                units.total_bytes(name, n, itemsize, world_size),
                units.input_bytes(name, n, itemsize, world_size),
                kernels,
            )
            for n in counts
        ]
    kernel_time.kernels(machine, name, world_size)  # raises if no kernel runs over these links
    calls, row = [], form.hidden * ROW_TYPE.itemsize
    for rows in dict.fromkeys(form.rows(size, ROW_TYPE.itemsize) for size in sizes):
        fitting, others = row_calls.kernels(machines.facts(machine, world_size), form, ROW_TYPE, rows)
        label = f"{name} {form.name}, bfloat16"
        calls.append(AskedCall(label, name, rows * row, rows * row, fitting, rows, others))
    return calls


def _at(machine: MachineSpec, world_size: int, call: AskedCall, mode: str) -> list[ForecastRow]:
    predictions = [kernel_time.predict(machine, kernel, world_size, call.nbytes, mode) for kernel in call.kernels]
    least = min(p.time_us for p in predictions)
    limit = kernel_time.limit(machine, call.collective, world_size, call.nbytes)
    factor = units.bus_factor(call.collective, world_size)
    return [
        ForecastRow(
            call.name,
            call.size_bytes,
            k.algorithm,
            k.protocol,
            p.time_us,
            p.waits,
            p.wire,
            units.algorithm_bandwidth(call.size_bytes, p.time_us) * factor,
            limit,
            p.shares,
            p.shares.limit,
            p.time_us == least,
        )
        for k, p in zip(call.kernels, predictions, strict=True)
    ]
