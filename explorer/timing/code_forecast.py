"""`tricomm predict --from-code`: the parts of a call's critical path, for each kernel, and the model's error."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tricomm.explorer.timing import from_code, row_times
from tricomm.explorer.timing.from_code import CodeTime
from tricomm.explorer.timing.timed_call import LaunchShape
from tricomm.explorer.timing.warp_clock import PARTS
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf import parsing, text_table, units
from tricomm.perf.cost_model import forecast as counted
from tricomm.perf.cost_model import kernel_time, published
from tricomm.perf.cost_model.forecast import AskedCall, NcclRow
from tricomm.perf.cost_model.kernel_time import Checked, TimeShares
from tricomm.perf.cost_model.machines import LATENCIES, MACHINES, MachineSpec
from tricomm.perf.cost_model.published_time import PublishedTime
from tricomm.perf.row_calls import RowForm

_FORM = RowForm()
# A test compares these with the result of `check`.
MEDIAN_ERROR, ROWS = 0.07, 261
_LABEL = "modelled from the compiled code, not measured"
LABEL = f"{_LABEL}; median error {MEDIAN_ERROR:.0%} of {ROWS} published rows"
_NUMBERS = ("size (B)", "time (us)", *PARTS, "busbw", "in flight (KiB)", "allows (GB/s)")
_HEADER = (_NUMBERS[0], "   kernel", "grid", *_NUMBERS[1:], "limited by")


@dataclass(frozen=True)
class CodeForecastRow:
    """One kernel at one size. `best`: it is the fastest kernel of the table; `runs`: as in `ForecastRow`."""

    collective: str
    size_bytes: int
    kernel: Kernel
    time: CodeTime
    eager_us: float
    busbw_gbs: float
    best: bool
    runs: bool

    @property
    def time_us(self) -> float:
        return self.time.time_us + self.eager_us

    @property
    def shares(self) -> TimeShares:
        return replace(self.time.shares, latency=self.time.shares.latency + self.eager_us)

    def to_json(self) -> dict[str, Any]:
        parts = {f"{name}_us": value for name, value in zip(PARTS, self.time.parts, strict=True)}
        return {
            "collective": self.collective,
            "size_bytes": self.size_bytes,
            "algorithm": self.kernel.algorithm,
            "protocol": self.kernel.protocol,
            "time_us": self.time_us,
            "launch_us": self.time.boundary + self.eager_us,
            **parts,
            **asdict(self.time.shape),
            "in_flight_bytes": self.time.in_flight,
            "allows_gbs": self.time.allows_gbs,
            "executed": self.time.executed,
            "busbw_gbs": self.busbw_gbs,
            "chunks": self.time.chunks,
            "barriers": self.time.barriers,
            "shares_us": asdict(self.shares),
            "limit": self.shares.limit,
            "best": self.best,
            "runs": self.runs,
        }


@dataclass(frozen=True)
class CodeForecast:
    """The rows of all kernels and sizes on `world_size` GPUs of `machine`. `nccl` and `left_out`: as in `Forecast`."""

    machine: MachineSpec
    world_size: int
    mode: str
    rows: list[CodeForecastRow]
    nccl: list[NcclRow]
    left_out: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        facts = {"schema": 1, "predicted": True, "modelled": LABEL, "machine": asdict(self.machine)}
        facts |= {"left_out": self.left_out, "nccl": [asdict(row) for row in self.nccl]}
        return {**facts, "ranks": self.world_size, "mode": self.mode, "results": [row.to_json() for row in self.rows]}

    def lines(self) -> list[str]:
        """A table for people, with the kernel that would run, the fastest kernel, and the time of NCCL."""
        launch = LATENCIES[self.machine.name].boundary + self.rows[0].eager_us
        lines = [
            f"# {self.world_size} x {self.machine.name}, {self.mode} mode, float32 unless said otherwise; {LABEL}",
            f"# time = launch + the critical path: start (to the first push), {', '.join(PARTS[1:])}",
            f"# launch {counted.launch(self.machine, launch)}",
            *_unlike(self.machine),
            "# grid: blocks/warps/words of a tile; in flight: payload on its way to a GPU's SMs, and what it allows",
            "# limited by: the largest of latency (of one tile a block), bytes in flight (its further tiles), links, "
            "barriers",
            "# >: runs by default; *: the fastest of these kernels; NCCL's time is what its own tuner expects",
            *counted.about_wire(row.kernel.algorithm for row in self.rows),
        ]
        for collective in dict.fromkeys(row.collective for row in self.rows):
            every: tuple[CodeForecastRow | NcclRow, ...] = (*self.rows, *self.nccl)
            rows = sorted(every, key=lambda row: row.size_bytes)  # stable, so NCCL stays last
            cells = [_cells(row) for row in rows if row.collective == collective]
            lines += ["#", f"# {collective}", *text_table.lines(_HEADER, cells, right=_NUMBERS)]
        return lines + counted.footer(self.left_out)


def _unlike(machine: MachineSpec) -> list[str]:
    """Comment lines about what the model does not cover on GPUs of `machine`."""
    if machine.architecture == machine.target:
        return []
    are = "may be of any" if machine.architecture == "any" else f"are {machine.architecture}"
    return [f"# compiled for {machine.target}, the oldest architecture that Triton has; {machine.name} {are}"]


def _cells(row: CodeForecastRow | NcclRow) -> tuple[str, ...]:
    if isinstance(row, NcclRow):
        name, parts = counted.marked(f"NCCL {row.algorithm}", row.runs), ("",) * len(PARTS)
        return str(row.size_bytes), name, "", f"{row.time_us:.1f}", *parts, f"{row.busbw_gbs:.1f}", "", "", ""
    shape, time = row.time.shape, row.time
    return (
        str(row.size_bytes),
        counted.marked(f"{row.kernel.algorithm}/{row.kernel.protocol}", row.runs, row.best),
        f"{shape.blocks}/{shape.warps}/{shape.tile}",
        f"{row.time_us:.1f}",
        *(f"{part:.1f}" for part in time.parts),
        f"{row.busbw_gbs:.1f}",
        f"{time.in_flight / 1024:.0f}",
        f"{time.allows_gbs:.0f}",
        row.shares.text(),
    )


def forecast(
    gpu: str, world_size: int, collective: str, sizes: str, mode: str, form: RowForm = _FORM, wire: str = ""
) -> CodeForecast:
    """The forecast of every kernel of `collective`, a comma-separated list, from its code. `form` and `wire` are as in
    `kernel_time`'s forecast.

    Raises `InvalidArgument` with the nearest names, `ResourceError` if nothing can be compiled here.
    """
    machine, wanted = kernel_time.find(gpu), parsing.parse_sizes(sizes)
    kernels = counted.names(collective)
    counted.check_wire(machine, world_size, wire, kernels)
    calls = [call for name in kernels for call in counted.asked(machine, world_size, name, wanted, form, 4, wire)]
    rows: list[CodeForecastRow] = []
    nccl: list[NcclRow] = []
    for call in calls:
        chosen = counted.runs(machine, world_size, call, mode, form, wire)
        rows += _at(machine, world_size, call, mode, form, chosen)
        nccl += counted.nccl_rows(machine, world_size, call, mode, chosen is None)
    return CodeForecast(machine, world_size, mode, rows, nccl, counted.missing(machine, world_size, calls))


def _at(
    machine: MachineSpec, world_size: int, call: AskedCall, mode: str, form: RowForm, chosen: tuple[str, str] | None
) -> list[CodeForecastRow]:
    rows = []
    for kernel in call.kernels:
        if call.rows:
            time = row_times.predict(machine, kernel, world_size, call.rows, form, counted.ROW_TYPE)
        else:
            time = from_code.predict(machine, kernel, world_size, call.nbytes)
        eager = machine.eager + time.shape.dependent * machine.overlap if mode == "eager" else 0.0
        busbw = units.bus_bandwidth(call.collective, world_size, call.size_bytes, time.time_us + eager)
        runs = (kernel.algorithm, kernel.protocol) == chosen
        rows.append(CodeForecastRow(call.name, call.size_bytes, kernel, time, eager, busbw, False, runs))
    least = min(row.time_us for row in rows)
    return [replace(row, best=row.time_us == least) for row in rows]


def check(rows: tuple[PublishedTime, ...] = published.MEASUREMENTS) -> list[Checked]:
    """Compare each published measurement with our kernel of that shape, on the published grid. If the grid is unknown,
    on the faster of two.

    If a published kernel sends only a share of our bytes (`PublishedTime.share`), the model's links are faster in
    proportion.
    """
    checked = []
    for row in rows:
        machine = MACHINES[row.gpu]
        links = replace(machine, kernels=machine.kernels / row.share)
        shape = LaunchShape(row.grid.blocks, row.grid.warps, 2 * row.grid.threads) if row.grid else None
        time = from_code.tuned(links, row.kernel, row.world_size, row.nbytes, shape).time_us
        checked.append(Checked(row, time + row.more_us + (machine.eager if row.mode == "eager" else 0.0)))
    return checked


def agreement(gpu: str = "h100", world_size: int = 8, sizes: str = "1K,4K,16K,64K,256K,1M,8M,64M") -> tuple[int, int]:
    """(number of sizes at which `kernel_time`, the model that counts bytes, has the same fastest all-reduce, number of
    sizes)."""
    machine = MACHINES[gpu]
    best = [row for row in forecast(gpu, world_size, "all_reduce", sizes, "graph").rows if row.best]
    same = 0
    for row in best:
        kernels = kernel_time.kernels(machine, "all_reduce", world_size)
        counted = [kernel_time.predict(machine, k, world_size, row.size_bytes).time_us for k in kernels]
        same += kernels[counted.index(min(counted))].name == row.kernel.name
    return same, len(best)


def report(rows: list[Checked]) -> list[str]:
    """A table of the `rows` from `check`, and how often the model that counts bytes has the same fastest kernel."""
    lines = kernel_time.report(rows)
    lines[0] = f"# {_LABEL}; 'measured' is others' hardware and kernels; * gave a constant"
    same, sizes = agreement()
    return [
        *lines,
        f"fastest kernel as counted bytes, hops and barriers have it at {same} of {sizes} sizes (8 h100, all_reduce)",
    ]
