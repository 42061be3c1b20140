"""`tricomm predict`: the cost model's times of every kernel of a collective over sizes, and which should win."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tricomm.perf import parsing, units
from tricomm.perf.cost_model import model
from tricomm.perf.cost_model.machines import Machine

LABEL = "predicted by a cost model, not measured"


@dataclass(frozen=True)
class Row:
    """One kernel at one size: `size_bytes` as nccl-tests counts it, `limit_us` what no kernel can stay under."""

    collective: str
    size_bytes: int
    algorithm: str
    protocol: str
    time_us: float
    waits_us: float
    wire_us: float
    busbw_gbs: float
    limit_us: float
    best: bool


@dataclass(frozen=True)
class Forecast:
    """Rows of every kernel and size on `world_size` GPUs of `machine`."""

    machine: Machine
    world_size: int
    mode: str
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        facts = {"schema": 1, "predicted": True, "machine": asdict(self.machine)}
        return {**facts, "ranks": self.world_size, "mode": self.mode, "results": [asdict(row) for row in self.rows]}

    def lines(self) -> list[str]:
        """A table for people; * marks the fastest kernel of a size."""
        m = self.machine
        head = (
            f"# {self.world_size} x {m.name}, {self.mode} mode; {LABEL}\n"
            f"# links {m.links:g} GB/s usable, hop {m.hop:g} us, barrier {m.barrier:g} us, launch {m.launch:g} us"
        )
        columns = f"{'size (B)':>12} {'kernel':<34}{'time (us)':>12}{'busbw (GB/s)':>14}{'limit (us)':>12}{'waits':>8}"
        lines, collective = [head], ""
        for row in self.rows:
            if row.collective != collective:
                collective = row.collective
                lines += [f"#\n# {collective}", columns]
            kernel = f"{row.algorithm}/{row.protocol}"
            lines.append(
                f"{row.size_bytes:>12} {kernel:<34}{row.time_us:>12.1f}{row.busbw_gbs:>14.1f}{row.limit_us:>12.2f}"
                f"{row.waits_us / row.time_us:>8.0%}{' *' if row.best else ''}"
            )
        return lines


def forecast(gpu: str, world_size: int, collectives: str, sizes: str, mode: str) -> Forecast:
    """The times of every kernel of a comma list of collectives. Raises `InvalidArgument` with the nearest names."""
    machine = model.find(gpu)
    names = parsing.parse_names(collectives, units.DATA_COLLECTIVES, "collective")
    wanted = parsing.parse_sizes(sizes)
    rows = [row for name in names for size in wanted for row in _at(machine, world_size, name, size, mode)]
    return Forecast(machine, world_size, mode, rows)


def _at(machine: Machine, world_size: int, collective: str, size: int, mode: str) -> list[Row]:
    elements = units.row_elements(collective, size, 1, world_size)
    nbytes = units.input_bytes(collective, elements, 1, world_size)
    total = units.total_bytes(collective, elements, 1, world_size)
    kernels = model.kernels(machine, collective, world_size)
    found = [model.predict(machine, kernel, world_size, nbytes, mode) for kernel in kernels]
    least = min(p.time_us for p in found)
    limit = model.limit(machine, collective, world_size, nbytes)
    factor = units.bus_factor(collective, world_size)
    return [
        Row(
            collective, total, k.algorithm, k.protocol, p.time_us, p.waits, p.wire,
            units.algorithm_bandwidth(total, p.time_us) * factor, limit, p.time_us == least,
        )
        for k, p in zip(kernels, found, strict=True)
    ]  # fmt: skip
