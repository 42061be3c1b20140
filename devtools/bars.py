"""Bars for the speed of the kernels and of the host path, in numbers that need no GPU, for this and another checkout.

    python -m devtools.bars                          compared with devtools/notes/performance.json
    python -m devtools.bars --against CHECKOUT       compared with another checkout or commit, which runs its own code
    python -m devtools.bars --graphs                 only the times in a graph that others have published, too
    python -m devtools.bars --json > FILE            the numbers alone; --against FILE compares with them later
    python -m devtools.bars --kept FILE              saves each row in FILE; the same command continues a broken run

Times are modelled from the compiled code, on 8 H100 in a CUDA graph; nothing is measured on a GPU. The host time is
measured here, and only its ratio to torch's `fake` backend says anything about another machine.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import click
import torch

from devtools import c10d_overhead, earlier_numbers, fused_times, kept_rows, kraken
from devtools.graph_bars import GRAPHS, GraphBar
from devtools.kept_rows import KeptRows, Row
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument, TricommError
from tricomm.explorer.timing import from_code, row_times, timed_call
from tricomm.explorer.timing.from_code import CodeTime
from tricomm.explorer.timing.timed_call import LaunchShape
from tricomm.explorer.timing.warp_clock import PARTS
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf import provenance, text_table, units
from tricomm.perf.cost_model import machines
from tricomm.perf.cost_model.machines import MACHINES
from tricomm.perf.machine_code import kernel_report
from tricomm.perf.machine_code.kernel_report import Variant
from tricomm.perf.row_calls import RowForm
from tricomm.policy import selection

LABEL = "modelled from the compiled code, not measured"
MACHINE, WORLD_SIZE = MACHINES["h100"], 8
FUSED_ROWS, FORMS = (1, 8, 32), (RowForm(8192), RowForm(8192, "fp8_per_token"), RowForm(8192, "nvfp4"))  # bfloat16
NCCL_US = 2.3  # for 8 bytes on 8 H200 (NVIDIA/nccl#1940)
_KEPT = Path(__file__).resolve().parent.parent / "devtools" / "notes" / "performance.json"
_HEADER = ("what", "unit", "before", "now", "now/before", "bar", "passes")
_BYTES = 3072 * WORLD_SIZE  # every tile has a ragged end, and all shards have the same length
_FAILED = (TricommError, OSError, subprocess.SubprocessError)

Value = float | int | str | None


@dataclass(frozen=True)
class CallRow:
    """An all-reduce of `nbytes` by `forced`, (algorithm, protocol). None: by the kernel that the shipped tables choose
    on a box with a switch. Its time may be at most `ratio` of its earlier time. `new`: there is no earlier time.
    """

    forced: tuple[str, str] | None
    nbytes: int
    ratio: float | None = None
    new: bool = False

    @property
    def kernel(self) -> Kernel:
        names = self.forced
        if names is None:
            choice = selection.choose(machines.facts(MACHINE, WORLD_SIZE), "all_reduce", self.nbytes, mode="graph")
            names = choice.algorithm, choice.protocol
        return registry.find("all_reduce", *names)

    @property
    def name(self) -> str:
        size = f"{self.nbytes >> 10} KiB" if self.nbytes < 1 << 20 else f"{self.nbytes >> 20} MiB"
        return f"{size} {'as chosen with a switch' if self.forced is None else ' '.join(self.forced)}"


SHORT = (CallRow(("one_shot", "ll"), 1 << 10, 0.6), CallRow(("two_shot", "ll"), 64 << 10, 0.8))
WIDE = (
    *(CallRow(("one_shot", "ll128"), nbytes, new=True) for nbytes in (1 << 10, 32 << 10)),
    *(CallRow(("two_shot", "ll128"), nbytes, new=True) for nbytes in (64 << 10, 512 << 10)),
)
# Two-shot, as without a switch: the links alone take more than 0.6 of the earlier time.
LONG = (
    CallRow(("two_shot", "simple"), 8 << 20),
    CallRow(("two_shot", "simple"), 64 << 20),
    CallRow(None, 8 << 20, 0.6),
    CallRow(None, 64 << 20, 0.6),
)


# Name, ratio of `c10d_overhead`, and the most that it may be.
HOST = (
    ("host time over `fake`: direct", "communicator_over_fake", 0.7),
    ("host time over `fake`: through c10d", "c10d_over_fake", 1.6),
    ("host time over all_reduce in place: all_reduce, out=", "out_over_in_place", 1.2),
    ("host time over all_reduce in place: all_gather", "all_gather_over_in_place", 1.2),
    ("host time over all_reduce in place: reduce_scatter", "reduce_scatter_over_in_place", 1.2),
    ("host time over all_reduce in place: broadcast", "broadcast_over_in_place", 1.2),
)


@dataclass(frozen=True)
class Bar:
    """A number and its limits: at most `most`, at least `least`, at most `ratio` of its earlier value."""

    name: str
    unit: str
    most: float | None = None
    least: float | None = None
    ratio: float | None = None

    def text(self) -> str:
        bounds = ((self.most, "<= {:g}"), (self.least, ">= {:g}"), (self.ratio, "<= {:g} of before"))
        return ", ".join(form.format(bound) for bound, form in bounds if bound is not None)

    def verdict(self, before: Value, now: Value) -> str:
        """The verdict, "yes" or "no"; an empty string if it is unknown."""
        if not self.text() or not isinstance(now, int | float):
            return ""
        holds = [now <= self.most] if self.most is not None else []
        holds += [now >= self.least] if self.least is not None else []
        if self.ratio is not None:
            if not isinstance(before, int | float):
                return ""
            holds.append(now <= self.ratio * before)
        return "yes" if all(holds) else "no"


def bars(graphs: bool = False) -> Iterator[Bar]:
    """All bars, in the order of the table; `graphs`: only those of `graph_bars`."""
    for each in GRAPHS:
        yield Bar(each.name, "us", each.us)
    if graphs:
        return
    for row in SHORT:
        most = 1.2 * NCCL_US if row.nbytes == 1 << 10 else None
        yield Bar(f"{row.name}: critical path", "us", most, ratio=row.ratio)
        yield from _of_call(row)
        yield Bar(f"{row.name}: round trips before the first push, by data", "", 1)
        yield Bar(f"{row.name}: round trips before the first push, in order", "")
    for row in WIDE:
        yield Bar(f"{row.name}: critical path", "us")
        yield from _of_call(row)
        yield Bar(f"{row.name}: round trips before the first push, by data", "", 1)
    for row in LONG:
        yield Bar(f"{row.name}: critical path", "us", ratio=row.ratio)
        yield Bar(f"{row.name}: share of the usable link bandwidth", "", least=0.8)
        yield Bar(f"{row.name}: share that bytes in flight allow", "", least=0.8)
        yield Bar(f"{row.name}: bytes in flight a GPU", "KiB", least=512)
        yield Bar(f"{row.name}: barriers that a chunk more takes", "", 1)
        yield Bar(f"{row.name}: barriers", "")
        yield Bar(f"{row.name}: chunks", "")
        yield from _of_call(row)
    for rows in FUSED_ROWS:
        for form in FORMS:
            yield Bar(f"{rows} {_rows(rows)} {form.name}: fused, as chosen", "us")
        yield Bar(f"{rows} {_rows(rows)} {FORMS[0].name}: fused over all-reduce and norm", "", fused_times.BAR)
    yield Bar(f"{FORMS[0].name}: bytes to peers over the formula", "", 1, 1)
    yield Bar(f"{FORMS[0].name}: spills", "", 0)
    yield Bar(f"{FORMS[0].name}: registers a thread", "")
    for name in kraken.INSTRUCTIONS:
        yield Bar(f"{name} over symmetric memory, bf16: SASS instructions for 16 bytes", "", kraken.INSTRUCTIONS[name])
    yield from (Bar(name, "", most) for name, _, most in HOST)


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def _of_call(row: CallRow) -> Iterator[Bar]:
    if row.forced is None:
        yield Bar(f"{row.name}: kernel", "")
    yield Bar(f"{row.name}: launched as blocks/warps/words of a tile", "")
    yield Bar(f"{row.name}: bytes to peers over the formula", "", 1, 1)
    yield Bar(f"{row.name}: executed instructions for 16 bytes, float32", "", ratio=None if row.new else 1)
    yield Bar(f"{row.name}: SASS instructions for 16 bytes, float32", "")
    yield Bar(f"{row.name}: spills", "", 0)
    yield Bar(f"{row.name}: registers a thread", "")


def measure(
    progress: Callable[[str], None] = lambda text: None, kept: KeptRows | None = None, graphs: bool = False
) -> dict[str, Any]:
    """The numbers of this checkout, by the names of their bars. For an unavailable number, the reason as text."""
    kept = kept or KeptRows()
    values: dict[str, Value] = {}
    details: dict[str, Any] = {}
    for name, get in _graphs() if graphs else chain(_graphs(), _units()):
        progress(name)
        row = kept.get(name, get)
        values |= row["values"]
        details |= row["parts"]
    return {
        "schema": 1,
        "label": LABEL,
        "commit": provenance.commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "versions": provenance.versions(),
        "values": values,
        "parts": details,
    }


def _graphs() -> Iterator[tuple[str, Callable[[], Row]]]:
    for each in GRAPHS:
        yield each.name, partial(_row, (each.name,), partial(_graph, each))


def _graph(bar: GraphBar) -> tuple[Value, ...]:
    return (bar.measured(),)


def _units() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Groups of numbers that are measured together, by name."""
    for row in (*SHORT, *WIDE, *LONG):
        yield row.name, partial(_call_row, row)
    for rows in FUSED_ROWS:
        for form in FORMS:
            name = f"{rows} {_rows(rows)} {form.name}: fused, as chosen"
            yield name, partial(_row, (name,), partial(_fused, rows, form))
        name = f"{rows} {_rows(rows)} {FORMS[0].name}: fused over all-reduce and norm"
        yield name, partial(_row, (name,), partial(_fused_ratio, rows))
    name = f"{FORMS[0].name}: bytes to peers over the formula"
    yield name, partial(_row, (name,), _fused_bytes)
    names = f"{FORMS[0].name}: spills", f"{FORMS[0].name}: registers a thread"
    yield names[0], partial(_row, names, _fused_code)
    for kernel in kraken.INSTRUCTIONS:
        name = f"{kernel} over symmetric memory, bf16: SASS instructions for 16 bytes"
        yield name, partial(_row, (name,), partial(_steady, f"all_reduce_{kernel}_zero_copy"))
    yield HOST[0][0], partial(_row, tuple(name for name, _, _ in HOST), _host)


def _row(names: tuple[str, ...], get: Callable[[], tuple[Value, ...]]) -> Row:
    try:
        got = get()
    except _FAILED as error:
        got = (f"not available: {error}",) * len(names)
    return {"values": dict(zip(names, got, strict=True)), "parts": {}}


def _call_row(row: CallRow) -> Row:
    try:
        time = from_code.predict(MACHINE, row.kernel, WORLD_SIZE, row.nbytes)
    except _FAILED as error:
        return {"values": {}, "parts": {row.name: f"not available: {error}"}}
    values = _times(row, time)
    code = tuple(
        f"{row.name}: {each}" for each in ("SASS instructions for 16 bytes, float32", "spills", "registers a thread")
    )
    for names, get in (
        ((f"{row.name}: bytes to peers over the formula",), partial(_counted, row.kernel, time.shape)),
        ((f"{row.name}: executed instructions for 16 bytes, float32",), partial(_executed, row)),
        (code, partial(_code, row.kernel, time.shape)),
    ):
        values |= _row(names, get)["values"]
    return {
        "values": values,
        "parts": {row.name: {f"{part}_us": us for part, us in zip(PARTS, time.parts, strict=True)}},
    }


def _times(row: CallRow, time: CodeTime) -> dict[str, Value]:
    path = sum(time.parts)
    kernel = row.kernel
    sent = float(units.moved(kernel, WORLD_SIZE)) * row.nbytes
    usable = MACHINE.multicast if kernel.multicast else MACHINE.kernels
    data, order = time.chain or (None, None)
    shape = time.shape
    return {
        f"{row.name}: critical path": path,
        f"{row.name}: round trips before the first push, by data": data,
        f"{row.name}: round trips before the first push, in order": order,
        f"{row.name}: kernel": f"{kernel.algorithm} {kernel.protocol}",
        f"{row.name}: share of the usable link bandwidth": sent / usable / 1e3 / path,
        f"{row.name}: share that bytes in flight allow": min(1.0, time.allows_gbs / usable),
        f"{row.name}: bytes in flight a GPU": time.in_flight / 1024,
        f"{row.name}: barriers that a chunk more takes": time.more_barriers,
        f"{row.name}: barriers": time.barriers,
        f"{row.name}: chunks": time.chunks,
        f"{row.name}: launched as blocks/warps/words of a tile": f"{shape.blocks}/{shape.warps}/{shape.tile}",
    }


def _counted(kernel: Kernel, shape: LaunchShape) -> tuple[Value, ...]:
    """Payload bytes of one block that does the whole call, divided by the formula."""
    plan = layout.plan(WORLD_SIZE, machines.ARENA_BYTES)
    moved = timed_call.run(MACHINE, kernel, WORLD_SIZE, _BYTES // 4, replace(shape, blocks=1), plan, False).moved
    return (moved / float(units.moved(kernel, WORLD_SIZE) * _BYTES),)


def _executed(row: CallRow) -> tuple[Value, ...]:
    return (from_code.instructions(MACHINE, row.kernel, WORLD_SIZE, row.nbytes),)


def _code(kernel: Kernel, shape: LaunchShape) -> tuple[Value, ...]:
    variant = Variant(kernel.name, MACHINE.architecture, "float32", block=shape.tile, warps=shape.warps)
    report = kernel_report.examine(variant)
    if report.failure is not None:
        raise InvalidArgument(report.failure)
    used, words_a_thread = report.resources, shape.tile / (32 * shape.warps)
    return report.steady * 2 / words_a_thread, used.spill_loads + used.spill_stores, used.registers


def _fused(rows: int, form: RowForm) -> tuple[Value, ...]:
    """Times with the boundary between two kernels, of which a fused call saves one."""
    return (fused_times.fused(MACHINE, WORLD_SIZE, rows, form)[0],)


def _fused_ratio(rows: int) -> tuple[Value, ...]:
    return (fused_times.ratio(MACHINE, WORLD_SIZE, rows, FORMS[0]),)


def _fused_bytes() -> tuple[Value, ...]:
    """Bytes that one block moves for three rows."""
    plan, kernel, form = (
        layout.plan(WORLD_SIZE, machines.ARENA_BYTES),
        registry.find(FUSED, "two_shot", "ll"),
        FORMS[0],
    )
    shape = row_times.predict(MACHINE, kernel, WORLD_SIZE, 1, form, torch.bfloat16).shape
    call = row_times.run(MACHINE, kernel, WORLD_SIZE, 3, form, torch.bfloat16, replace(shape, blocks=1), plan)
    return (call.moved / float(units.moved(kernel, WORLD_SIZE) * 3 * form.hidden * 2),)


def _fused_code() -> tuple[Value, ...]:
    """Numbers about the code of the two-shot kernel."""
    name = registry.find(FUSED, "two_shot", "ll").name
    (variant,) = (v for v in kernel_report.variants((MACHINE.architecture,), name) if v.form == FORMS[0].name)
    used = kernel_report.examine(variant).resources
    return used.spill_loads + used.spill_stores, used.registers


def _steady(kernel: str) -> tuple[Value, ...]:
    return (kernel_report.examine(Variant(kernel, MACHINE.architecture)).steady,)


def _host() -> tuple[Value, ...]:
    times = c10d_overhead.measure()
    return tuple(times[ratio] for _, ratio, _ in HOST)


def lines(before: dict[str, Any] | None, now: dict[str, Any], graphs: bool = False) -> list[str]:
    """The table, with the origin of both columns."""
    columns = {"before": before, "now": now}
    heads = [f"# {WORLD_SIZE} x {MACHINE.name} unless said otherwise, all_reduce, graph mode; times are {LABEL}"]
    heads += [_origin(name, data) for name, data in columns.items() if data is not None]
    rows = []
    for bar in bars(graphs):
        old, new = ((data or {"values": {}})["values"].get(bar.name) for data in columns.values())
        ratio = f"{new / old:.2f}" if isinstance(old, int | float) and isinstance(new, int | float) and old else ""
        rows.append((bar.name, bar.unit, _shown(old), _shown(new), ratio, bar.text(), bar.verdict(old, new)))
    return [*heads, *text_table.lines(_HEADER, rows, right=_HEADER[2:5])]


def _origin(name: str, data: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
    return f"# {name}: commit {data['commit'] or 'unknown'}, {data['date']}; {versions}"


def _shown(value: Value) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.2f}"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@click.command()
@click.option("--against", type=click.Path(path_type=Path), default=_KEPT, help="A checkout, a file or a commit.")
@click.option("--graphs", is_flag=True, help="Only times in a graph, boundary included, beside published ones.")
@click.option("--json", "as_json", is_flag=True, help="Print this checkout's numbers as JSON.")
@kept_rows.option
def main(against: Path, graphs: bool, as_json: bool, kept: Path | None) -> None:
    """Print the numbers of this checkout and of another one, and which numbers of this one pass their bars."""
    try:
        rows = KeptRows(kept)
        before = None if as_json else earlier_numbers.find(against, graphs)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
    now = measure(lambda text: click.echo(text, err=True), rows, graphs)
    click.echo(json.dumps(now, indent=1) if as_json else "\n".join(lines(before, now, graphs)))


if __name__ == "__main__":
    main()
