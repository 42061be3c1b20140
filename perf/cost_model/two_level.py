"""The time that an all_reduce of several nodes should take in two levels: kernels inside each node, NCCL across.

    time = the kernels' own (`kernel_time`) + across + 2 (P-1)/P of the bytes that cross / card

across    one latency of NCCL's between nodes: 15 to 20 us, which classic NCCL takes for a small call
card      the part of a GPU's network card that NCCL reaches: 80 % of the nominal rate, as of links; 12.5 GB/s a GPU in
          a DGX-1V, 25 in a DGX A100, 50 in a DGX H100 and B200 (their data sheets)
nccl      NCCL by itself on 4 nodes of 8 H100: 45.8, 87, 115 and 251 us for 8 KiB, 256 KiB, 1 and 8 MiB, as MSCCL++
          publishes it beside its own; between these sizes by the powers of two

No time of two levels has been published or measured: nothing here has been set beside one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument
from tricomm.perf import parsing, text_table
from tricomm.perf.cost_model import forecast as kernel_forecast
from tricomm.perf.cost_model import kernel_time
from tricomm.perf.cost_model.machines import MachineSpec
from tricomm.policy import levels

ACROSS_US = 17.5
_REACHED = 0.8
_CARDS = {"v100": 12.5, "a100": 25.0, "h100": 50.0, "h200": 50.0, "b200": 50.0, "gb200": 50.0}
_NCCL = ((8 << 10, 45.8), (256 << 10, 87.0), (1 << 20, 115.0), (8 << 20, 251.0))
_PUBLISHED = (("h100", "h200"), 8, 4)
_UNKNOWN = "its times are published for 4 nodes of 8 h100 (taken for h200, too) and 8 KiB to 8 MiB alone"
_STEPS = {"shards": ("reduce_scatter", "all_gather"), "leaders": ("reduce", "broadcast")}  # before and after NCCL
_HEADER = ("size (B)", "way", "time (us)", "inside (us)", "across (us)", "")


@dataclass(frozen=True)
class TwoLevelTime:
    """Microseconds of one call of `nbytes` of input per rank; `by_table`: what the shipped table chooses."""

    nbytes: int
    way: str
    time_us: float
    inside_us: float
    across_us: float
    by_table: bool


def predict(machine: MachineSpec, ranks: int, nodes: int, nbytes: int, form: str, mode: str = "graph") -> TwoLevelTime:
    """The time of one call by `form` on `nodes` nodes of `ranks` ranks each.

    Raises `InvalidArgument` for a machine whose network card is not known, and if no kernel can run.
    """
    if machine.name not in _CARDS:
        raise InvalidArgument(f"two levels on {machine.name}: its network cards are not known; {', '.join(_CARDS)} are")
    crossing = nbytes / ranks if form == "shards" else float(nbytes)
    inside = sum(
        _fastest(machine, name, ranks, size, mode) for name, size in zip(_STEPS[form], (nbytes, crossing), strict=True)
    )
    across = ACROSS_US + 2 * (nodes - 1) / nodes * crossing / (_CARDS[machine.name] * _REACHED) / 1e3
    chosen = levels.choose("cuda", levels.NODES, nbytes).form == form
    return TwoLevelTime(nbytes, f"two_level/{form}", inside + across, inside, across, chosen)


def nccl(machine: MachineSpec, ranks: int, nodes: int, nbytes: int) -> TwoLevelTime | None:
    """NCCL's published time, None if there is none for such nodes or such a size."""
    if machine.name not in _PUBLISHED[0] or (ranks, nodes) != _PUBLISHED[1:]:
        return None
    for (small, first), (large, last) in zip(_NCCL, _NCCL[1:], strict=False):
        if small <= nbytes <= large:
            part = math.log(nbytes / small) / math.log(large / small)
            time = first * (last / first) ** part
            return TwoLevelTime(nbytes, "nccl", time, 0.0, time, levels.choose("cuda", "nodes", nbytes).form is None)
    return None


def _fastest(machine: MachineSpec, collective: str, ranks: int, nbytes: float, mode: str) -> float:
    kernels = kernel_time.kernels(machine, collective, ranks)
    return min(kernel_time.predict(machine, kernel, ranks, nbytes, mode).time_us for kernel in kernels)


@dataclass(frozen=True)
class TwoLevelForecast:
    """Every way at every size, on `nodes` nodes of `ranks` GPUs of `machine`. `left_out`: by name, why a kernel is not
    used inside a node, or why there is no time of NCCL."""

    machine: MachineSpec
    ranks: int
    nodes: int
    mode: str
    rows: list[TwoLevelTime]
    left_out: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        facts = {"schema": 1, "predicted": True, "machine": asdict(self.machine), "nodes": self.nodes}
        facts["left_out"] = self.left_out
        return {**facts, "ranks": self.ranks, "mode": self.mode, "results": [asdict(row) for row in self.rows]}

    def lines(self) -> list[str]:
        """A table for people: * at the fastest way of a size, t at the one that the table chooses."""
        cells = []
        for row in self.rows:
            best = row.time_us == min(other.time_us for other in self.rows if other.nbytes == row.nbytes)
            marks = "*" * best + "t" * row.by_table
            times = [f"{time:.1f}" for time in (row.time_us, row.inside_us, row.across_us)]
            cells.append((str(row.nbytes), row.way, *times, marks))
        head = f"# {self.nodes} nodes of {self.ranks} x {self.machine.name}, {self.mode} mode; predicted, not measured"
        table = text_table.lines(_HEADER, cells, right=("size (B)", "time (us)", "inside (us)", "across (us)"))
        return [head, *table, *kernel_forecast.footer(self.left_out)]


def check(nodes: int, collective: str, quantize: str | None, from_code: bool) -> None:
    """Raises `InvalidArgument` for a request that is not modelled for several nodes."""
    if collective == FUSED or quantize is not None:
        raise InvalidArgument(
            f"--nodes {nodes}: {FUSED} is fused inside a node alone; on several ones it is an all_reduce in two levels "
            "and then torch's norm. --collective all_reduce without --quantize gives the first, and --nodes 1 both"
        )
    if collective != "all_reduce":
        raise InvalidArgument(
            f"--nodes {nodes} --collective {collective}: only all_reduce goes in two levels; others of such groups are "
            "NCCL's. --collective all_reduce works, and --nodes 1 for the others"
        )
    if from_code:
        raise InvalidArgument(f"--nodes {nodes} --from-code: two levels are modelled from bytes and hops; leave it out")


def forecast(gpu: str, ranks: int, nodes: int, sizes: str, mode: str) -> TwoLevelForecast:
    """The times of an all_reduce in both forms, and NCCL's. Raises `InvalidArgument` as `predict`."""
    machine, rows = kernel_time.find(gpu), []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(name for steps in _STEPS.values() for name in steps):
        left_out |= kernel_time.left_out(machine, name, ranks)
    for nbytes in parsing.parse_sizes(sizes):
        rows += [predict(machine, ranks, nodes, nbytes, form, mode) for form in levels.FORMS]
        known = nccl(machine, ranks, nodes, nbytes)
        rows += [known] if known is not None else []
        if known is None:
            left_out["nccl"] = _UNKNOWN
    return TwoLevelForecast(machine, ranks, nodes, mode, rows, left_out)
