"""`tricomm predict`: the cost model's times of every kernel of a collective over sizes, and which should win."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tricomm.perf import parsing, text_table, units
from tricomm.perf.cost_model import kernel_time
from tricomm.perf.cost_model.limits import TimeShares
from tricomm.perf.cost_model.machines import MachineSpec

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
    """Rows of every kernel and size on `world_size` GPUs of `machine`."""

    machine: MachineSpec
    world_size: int
    mode: str
    rows: list[ForecastRow]

    def to_json(self) -> dict[str, Any]:
        facts = {"schema": 1, "predicted": True, "machine": asdict(self.machine)}
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
        return lines


def _cells(row: ForecastRow) -> tuple[str, ...]:
    times = (f"{row.time_us:.1f}", f"{row.busbw_gbs:.1f}", f"{row.limit_us:.2f}", f"{row.waits_us / row.time_us:.0%}")
    best = "*" if row.best else ""
    return str(row.size_bytes), f"{row.algorithm}/{row.protocol}", *times, row.shares_us.text(), best


def forecast(gpu: str, world_size: int, collectives: str, sizes: str, mode: str) -> Forecast:
    """The times of every kernel of a comma list of collectives. Raises `InvalidArgument` with the nearest names."""
    machine = kernel_time.find(gpu)
    names = parsing.parse_names(collectives, units.DATA_COLLECTIVES, "collective")
    wanted = parsing.parse_sizes(sizes)
    rows = [row for name in names for size in wanted for row in _at(machine, world_size, name, size, mode)]
    return Forecast(machine, world_size, mode, rows)


def _at(machine: MachineSpec, world_size: int, collective: str, size: int, mode: str) -> list[ForecastRow]:
    elements = units.row_elements(collective, size, 1, world_size)
    nbytes = units.input_bytes(collective, elements, 1, world_size)
    total = units.total_bytes(collective, elements, 1, world_size)
    kernels = kernel_time.kernels(machine, collective, world_size)
    predictions = [kernel_time.predict(machine, kernel, world_size, nbytes, mode) for kernel in kernels]
    least = min(p.time_us for p in predictions)
    limit = kernel_time.limit(machine, collective, world_size, nbytes)
    factor = units.bus_factor(collective, world_size)
    return [
        ForecastRow(
            collective,
            total,
            k.algorithm,
            k.protocol,
            p.time_us,
            p.waits,
            p.wire,
            units.algorithm_bandwidth(total, p.time_us) * factor,
            limit,
            p.shares,
            p.shares.limit,
            p.time_us == least,
        )
        for k, p in zip(kernels, predictions, strict=True)
    ]
