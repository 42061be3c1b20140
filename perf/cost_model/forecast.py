"""`tricomm predict`: the cost model's times of every kernel of a collective over sizes, and which should win."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.left_out import left_out_lines
from tricomm.metrics.counters import NCCL
from tricomm.perf import parsing, row_calls, text_table, units
from tricomm.perf.cost_model import kernel_time, machines, nccl_time
from tricomm.perf.cost_model.kernel_time import TimeShares
from tricomm.perf.cost_model.machines import MachineSpec
from tricomm.perf.row_calls import RowForm
from tricomm.policy import backend_choice, selection
from tricomm.policy.backend_choice import GroupFacts

ROW_TYPE = torch.bfloat16  # of fused calls
_FORM = RowForm()
LABEL = "predicted by a cost model, not measured"
_NUMBERS = ("size (B)", "us", "vs NCCL", "busbw", "limit", "waits")
_HEADER = (_NUMBERS[0], "   kernel", *_NUMBERS[1:], "limited by")
_LEGEND = """\
# >          runs if neither the call nor a tuned table names another; bfloat16 as float32
# *          the fastest of these kernels by the model
# vs NCCL    NCCL's time over this one's: 2.0x is twice as fast. NCCL's time is what its own tuner expects
# busbw      in GB/s; limit: microseconds that the fewest bytes need on the links, unless they are quantised
# waits      the part of the time for launch, hops and barriers
# limited by the largest part of the time
#"""

_WORTH, _CLOSE, _NOT_WORTH = "worth it", "too close to tell", "not worth it"
_ADVICE = {_WORTH: "", _CLOSE: "; bench --against nccl tells", _NOT_WORTH: "; leave these calls to NCCL"}


@dataclass(frozen=True)
class ForecastRow:
    """One kernel at one size: `size_bytes` as nccl-tests counts it, `limit_us` a lower bound for any kernel that does
    not quantise, `limit` the largest share of this kernel's time. `runs`: selection chooses this kernel."""

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
    runs: bool


@dataclass(frozen=True)
class NcclRow:
    """NCCL's call of the same size (`nccl_time`), made by `algorithm`, such as `Ring/LL`."""

    collective: str
    size_bytes: int
    algorithm: str
    time_us: float
    busbw_gbs: float
    runs: bool


@dataclass(frozen=True)
class Forecast:
    """Rows of every kernel and size on `world_size` GPUs of `machine`. `left_out`: by kernel, the reason why these GPUs
    or this Triton do not support it, or why it does not support such rows."""

    machine: MachineSpec
    world_size: int
    mode: str
    rows: list[ForecastRow]
    nccl: list[NcclRow]
    left_out: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        facts = {"schema": 1, "predicted": True, "machine": asdict(self.machine), "left_out": self.left_out}
        facts |= {"ranks": self.world_size, "mode": self.mode, "nccl": [asdict(row) for row in self.nccl]}
        return {**facts, "results": [asdict(row) for row in self.rows]}

    def lines(self) -> list[str]:
        """A table for people, with the kernel that would run, the fastest one, and what NCCL would take."""
        m = self.machine
        lines = [
            f"# {self.world_size} x {m.name}, {self.mode} mode; {LABEL}",
            f"# links {m.links:g} GB/s usable, hop {m.hop:g} us, barrier {m.barrier:g} us",
            f"# launch {launch(m, m.launch)}",
            "#",
            *_LEGEND.splitlines(),
        ]
        lines[-1:] = [*about_wire(row.algorithm for row in self.rows), "#"]
        for collective in dict.fromkeys(row.collective for row in self.rows):
            table = text_table.lines(_HEADER, self._cells(collective), right=_NUMBERS)
            lines += [f"# {collective}", *table, *self._verdict(collective), "#"]
        return lines[:-1] + footer(self.left_out)

    def _cells(self, collective: str) -> Iterator[tuple[str, ...]]:
        for size in dict.fromkeys(row.size_bytes for row in self.rows if row.collective == collective):
            nccl = self._nccl(collective, size)
            for row in self.rows:
                if (row.collective, row.size_bytes) == (collective, size):
                    yield _cells(row, nccl)
            if nccl is not None:
                times = (f"{nccl.time_us:.1f}", "", f"{nccl.busbw_gbs:.1f}")
                yield str(size), marked(f"NCCL {nccl.algorithm}", nccl.runs), *times, "", "", ""

    def _nccl(self, collective: str, size: int) -> NcclRow | None:
        return next((r for r in self.nccl if (r.collective, r.size_bytes) == (collective, size)), None)

    def _verdict(self, collective: str) -> Iterator[str]:
        """The sizes at which tricomm is faster, at which it is not, and at which the errors of the two models leave it
        open."""
        here = [row for row in self.nccl if row.collective == collective]
        if not here:
            yield "# NCCL's tuner has no model of this call: bench --against nccl tells"
            return
        ours, theirs = kernel_time.median_error(kernel_time.check()), nccl_time.median_error()
        error, by_verdict = math.hypot(ours, theirs), dict[str, dict[int, float]]()
        for row in self.rows:
            nccl = self._nccl(collective, row.size_bytes) if row.collective == collective and row.runs else None
            if nccl is not None:
                ratio = nccl.time_us / row.time_us
                sure = _WORTH if ratio > 1 + error else _NOT_WORTH if ratio < 1 / (1 + error) else _CLOSE
                by_verdict.setdefault(sure, {})[row.size_bytes] = ratio
        sizes = sorted(row.size_bytes for row in here)
        for verdict, ratios in by_verdict.items():
            least, most = (f"{edge(ratios.values()):.1f}x" for edge in (min, max))
            spread = least if least == most else f"{least} to {most}"
            yield f"# {verdict}: {spread} as fast as NCCL at {_sizes(list(ratios), sizes)}{_ADVICE[verdict]}"
        if left := [row.size_bytes for row in here if row.runs]:
            yield f"# left to NCCL by default: {_sizes(left, sizes)}, above the NCCL threshold"
        yield f"# median error against published times: {ours:.0%}, NCCL's {theirs:.0%}, of their ratio {error:.0%}"


def _sizes(some: list[int], every: list[int]) -> str:
    """`1 KiB to 1 MiB` if `some` are consecutive in `every`; otherwise a list of all of them."""
    least, most = min(some), max(some)
    if len(some) > 2 and [size for size in every if least <= size <= most] == sorted(some):
        return f"{units.text(least)} to {units.text(most)}"
    return ", ".join(map(units.text, sorted(some)))


def launch(machine: MachineSpec, usual: float) -> str:
    """The time of a launch in words: `usual` microseconds, and that of a dependent launch if such GPUs support it."""
    if machine.no_dependent_launch:
        return f"{usual:g} us"
    most = layout.MAX_BLOCKS // 2
    sooner = f"{usual - machine.overlap:g} us for a dependent launch"
    return f"{usual:g} us, in a graph {sooner}: up to {most} blocks, after another one"


def footer(reasons: dict[str, str]) -> list[str]:
    """The lines below the tables that say why kernels are left out."""
    lines = [f"# {line}" for line in left_out_lines(reasons.items())]
    return ["#", *lines] if lines else []


def about_wire(algorithms: Iterable[str]) -> list[str]:
    """The line of the legend about kernels that quantise, if there are any."""
    named = [name for name in dict.fromkeys(algorithms) if registry.wire_of(name)]
    return [f"# {name}: of float32; as large a call of bfloat16 sends up to twice as much" for name in named]


def marked(name: str, runs: bool, best: bool = False) -> str:
    """A cell of the column `kernel`, with the marks of the legend."""
    return f"{'>' if runs else ' '}{'*' if best else ' '} {name}"


def _cells(row: ForecastRow, nccl: NcclRow | None) -> tuple[str, ...]:
    name = marked(f"{row.algorithm}/{row.protocol}", row.runs, row.best)
    speed = f"{nccl.time_us / row.time_us:.1f}x" if nccl is not None else "-"
    times = (f"{row.time_us:.1f}", speed, f"{row.busbw_gbs:.1f}", f"{row.limit_us:.2f}")
    return str(row.size_bytes), name, *times, f"{row.waits_us / row.time_us:.0%}", row.shares_us.text()


def forecast(
    gpu: str, world_size: int, collective: str, sizes: str, mode: str, form: RowForm = _FORM, wire: str = ""
) -> Forecast:
    """The times of every kernel of a comma list of collectives; an all_reduce_rms_norm has rows of `form`, and an
    all_reduce of a group with `Options(wire=wire)` has the kernel that quantises so.

    Raises `InvalidArgument` with the nearest names, for rows that no fused kernel takes, and if such GPUs do not
    quantise so.
    """
    machine = kernel_time.find(gpu)
    check_wire(machine, world_size, wire, names(collective))
    wanted = parsing.parse_sizes(sizes)
    calls = [call for name in names(collective) for call in asked(machine, world_size, name, wanted, form, wire=wire)]
    rows: list[ForecastRow] = []
    nccl: list[NcclRow] = []
    for call in calls:
        chosen = runs(machine, world_size, call, mode, form, wire)
        rows += _at(machine, world_size, call, mode, chosen, form)
        nccl += nccl_rows(machine, world_size, call, mode, chosen is None)
    return Forecast(machine, world_size, mode, rows, nccl, missing(machine, world_size, calls))


def nccl_rows(machine: MachineSpec, world_size: int, call: AskedCall, mode: str, runs: bool) -> Iterator[NcclRow]:
    """NCCL's row of the call; none if its tuner does not model it."""
    time = nccl_time.predict(machine, call.collective, world_size, call.size_bytes, mode)
    if time is not None:
        busbw = units.bus_bandwidth(call.collective, world_size, call.size_bytes, time.time_us)
        yield NcclRow(call.name, call.size_bytes, time.how, time.time_us, busbw, runs)


def check_wire(machine: MachineSpec, world_size: int, wire: str, collectives: tuple[str, ...]) -> None:
    """Raises `InvalidArgument` if no call of `collectives` on such GPUs is quantised by `wire`."""
    if wire and "all_reduce" not in collectives:
        raise InvalidArgument(
            f"--wire {wire}: only all_reduce is quantised, and asked for is {', '.join(collectives)}; leave it out"
        )
    if wire:
        selection.check_wire(replace(machines.facts(machine, world_size), wire=wire))


def runs(
    machine: MachineSpec, world_size: int, call: AskedCall, mode: str, form: RowForm, wire: str = ""
) -> tuple[str, str] | None:
    """The algorithm and protocol that a communicator with default options, except `wire`, chooses for the call; None if
    it chooses NCCL, or does not fuse a fused call."""
    cube = machine.cube and world_size == registry.CUBE_RANKS
    site = machines.facts(machine, world_size, cube)
    if machine.architecture == "any":
        site = replace(site, topology="pcie")
    if call.rows:
        try:
            kernel = row_calls.chosen(site, form, ROW_TYPE, call.rows)
        except InvalidArgument:  # too many rows to be fused
            return None
        return kernel.algorithm, kernel.protocol
    site = replace(site, wire=wire)
    if selection.wire_from(site) is None:
        wire = ""
    switch = bool(machine.multicast)
    facts = GroupFacts("cuda", world_size, 1, None, NCCL, reachable=not cube, switch=switch, wire=wire)
    op = "sum" if COLLECTIVES[call.collective].reduces else "none"
    if backend_choice.decide(facts, call.collective, torch.float32, op, call.nbytes).backend == NCCL:
        return None
    choice = selection.choose(site, call.collective, call.nbytes, mode=mode)
    return choice.algorithm, choice.protocol


def missing(machine: MachineSpec, world_size: int, calls: Sequence[AskedCall]) -> dict[str, str]:
    """By name, the reasons why kernels of the collectives of `calls` are left out."""
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
    machine: MachineSpec,
    world_size: int,
    name: str,
    sizes: tuple[int, ...],
    form: RowForm,
    itemsize: int = 1,
    wire: str = "",
) -> list[AskedCall]:
    """The calls of a collective at `sizes`, of elements of `itemsize`, with the kernels that such GPUs have."""
    if name != FUSED:
        kernels = tuple(kernel_time.kernels(machine, name, world_size, wire))
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


def _dependent(machine: MachineSpec, world_size: int, call: AskedCall, kernel: Kernel, form: RowForm) -> bool:
    if not call.rows:
        return kernel_time.is_dependent(machine, kernel, world_size, call.nbytes)
    site = machines.facts(machine, world_size)
    return bool(row_calls.launched(site, kernel, form, ROW_TYPE, call.rows).constexprs["DEPENDENT"])


def _at(
    machine: MachineSpec, world_size: int, call: AskedCall, mode: str, chosen: tuple[str, str] | None, form: RowForm
) -> list[ForecastRow]:
    predictions = []
    for kernel in call.kernels:
        launching = kernel_time.launching(machine, _dependent(machine, world_size, call, kernel, form), mode)
        predictions.append(kernel_time.predict(launching, kernel, world_size, call.nbytes, mode))
    least = min(p.time_us for p in predictions)
    limit = kernel_time.limit(machine, call.collective, world_size, call.nbytes)
    return [
        ForecastRow(
            call.name,
            call.size_bytes,
            k.algorithm,
            k.protocol,
            p.time_us,
            p.waits,
            p.wire,
            units.bus_bandwidth(call.collective, world_size, call.size_bytes, p.time_us),
            limit,
            p.shares,
            p.shares.limit,
            p.time_us == least,
            (k.algorithm, k.protocol) == chosen,
        )
        for k, p in zip(call.kernels, predictions, strict=True)
    ]
