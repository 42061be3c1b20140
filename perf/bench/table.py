"""The table of a benchmark for people: grouped by size, at most 120 columns, the best kernel marked, and a summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean

from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels.collectives import registry
from tricomm.perf.bench.measure import Rows
from tricomm.perf.bench.request import Settings
from tricomm.perf.bench.session import Results
from tricomm.perf.bench_row import OURS, PLACES, BenchRow
from tricomm.perf.cost_model import machines
from tricomm.perf.workers import WorkerMessage

SIMULATED = "simulated: Triton's interpreter on a CPU"
WIDEST = 120
_FEWEST = 100  # samples: with fewer, the 99th percentile is the maximum
SEVERAL = {"symm_mem": "symm_mem_multimem", "kraken": "kraken_one_shot"}  # implementations a library; the longest name


@dataclass(frozen=True)
class _Group:
    """The rows of one size: the fastest of tricomm's kernels, and the fastest of the libraries."""

    best: Rows | None
    other: Rows | None


@dataclass(frozen=True)
class _Column:
    """A column of the table; if the terminal is too narrow, the column with the least `worth` is left out first."""

    title: str
    unit: str
    width: int
    worth: int
    text: Callable[[Rows, _Group], str]
    group: str = ""
    left: bool = False


class BenchTable:
    """The lines of a run of `settings`, whose ranks have sent `header`, none longer than `width`."""

    def __init__(self, settings: Settings, header: WorkerMessage, width: int = WIDEST) -> None:
        self._settings, self._header = settings, header
        self._libraries = tuple(dict.fromkeys(case.library for case in settings.cases if case.library != OURS))
        self._columns = _columns(settings, max(map(len, _names(settings, header["ranks"]))), self._versus)
        while sum(column.width + 1 for column in self._columns) > min(width, WIDEST) and len(self._columns) > 5:
            self._columns.remove(min(self._columns, key=lambda column: column.worth))

    @property
    def _versus(self) -> str:
        """The title of the column of speed-ups; empty if no library is measured."""
        return f"vs {self._libraries[0]}" if len(self._libraries) == 1 else "vs best" if self._libraries else ""

    def heading(self) -> list[str]:
        """Comment lines, from `# tricomm bench` down to the column names."""
        header, settings = self._header, self._settings
        versions = ", ".join(f"{name} {value.partition(':')[0]}" for name, value in header["versions"].items())
        lines = [
            "tricomm bench"
            + (f" ({SIMULATED}; no time here says anything about a GPU)" if header["simulated"] else ""),
            f"device    {header['device']}",
            f"topology  {header['topology']}",
            f"ranks     {header['ranks']}, memory shared by {header['kind']}",
            f"versions  {versions}",
            f"calls     {settings.warmup} warm-up, {settings.iters} timed back to back; time: the slowest rank's mean",
            f"check     {'2 more calls per row and place, exact' if settings.check else 'off'}",
            "spread    of single calls, out of place if they can be; skew: between the medians of the ranks",
            "*         the fastest of tricomm's kernels at this size",
        ]
        if self._libraries:
            who = "the fastest library" if len(self._libraries) > 1 else self._libraries[0]
            native = "; gloo runs natively" if header["simulated"] and "gloo" in self._libraries else ""
            lines.append(f"{self._versus:<9} the time of {who} over this kernel's: 2.00x is twice as fast{native}")
        spans = groupby(self._columns, key=lambda column: column.group)
        wide = [(name, sum(column.width + 1 for column in columns) - 1) for name, columns in spans]
        groups = " ".join(f"{name:>{width}}" for name, width in wide)
        names = self._line([column.title for column in self._columns])
        units = self._line([column.unit for column in self._columns])
        return [*(f"# {line}" for line in lines), "#", *(f"#{line[1:]}".rstrip() for line in (groups, names, units))]

    def group(self, rows: Sequence[Rows]) -> list[str]:
        """The lines of the rows of one size."""
        group = _group(rows)
        return [self._line([column.text(row, group) for column in self._columns]) for row in rows]

    def _line(self, cells: Sequence[str]) -> str:
        placed = zip(cells, self._columns, strict=True)
        return " ".join(f"{cell:{'<' if column.left else '>'}{column.width}}" for cell, column in placed).rstrip()


def kernel_of(rows: Rows) -> str:
    """The kernel, or the library's implementation."""
    measured = rows[0].measured
    return measured.algorithm if measured.protocol == "-" else f"{measured.algorithm}/{measured.protocol}"


def block_of(rows: Rows) -> str:
    """The name of the block of rows that differ only in size and kernel."""
    measured = rows[0].measured
    op = "" if measured.op == "none" else f" {measured.op}"
    return f"{measured.collective} {measured.dtype}{op}, {measured.mode}"


def group_of(rows: Rows) -> tuple[str, int]:
    """The name of the rows of one size, which are compared with each other."""
    return block_of(rows), rows[0].measured.nbytes


def _names(settings: Settings, ranks: int) -> Iterator[str]:
    """The kernels and libraries that may appear."""
    for case in settings.cases:
        if case.library != OURS:
            yield SEVERAL.get(case.library, case.library)
            continue
        wire = registry.wire_of(case.algorithm)
        for k in registry.of(case.collective, ranks, multicast=True, wire=bool(wire)):
            if case.algorithm in (None, k.algorithm) and case.protocol in (None, k.protocol):
                yield f"{'unfused_' if case.collective == FUSED else ''}{k.algorithm}/{k.protocol}"


def _columns(settings: Settings, longest: int, versus: str) -> list[_Column]:
    def at(place: str, text: Callable[[BenchRow], str]) -> Callable[[Rows, _Group], str]:
        return lambda rows, group: next((text(row) for row in rows if row.measured.place == place), "-")

    def first(text: Callable[[BenchRow], str]) -> Callable[[Rows, _Group], str]:
        return lambda rows, group: text(rows[0])

    def name(rows: Rows, group: _Group) -> str:
        return f"{'*' if rows is group.best else ' '} {kernel_of(rows)}"

    def wrong(rows: Rows, group: _Group) -> str:
        counts = [row.wrong for row in rows if row.wrong is not None]
        return str(sum(counts)) if counts else "n/a"

    columns = [
        _Column("size", "(B)", 1 + max(8, len(str(max(settings.sizes)))), 99, first(lambda r: str(r.measured.nbytes))),
        _Column("  kernel", "", 2 + longest, 98, name, left=True),
    ]
    fused = all(case.collective == FUSED for case in settings.cases)  # which has no call in place
    for place, worth in zip(PLACES[: 1 if fused else 2], (20, 10), strict=False):
        title = place.replace("_", "-")
        columns += [
            _Column("time", "(us)", 8, worth + 5, at(place, lambda row: three(row.time_us)), title),
            _Column("algbw", "(GB/s)", 7, worth // 5, at(place, lambda row: rate(row.algbw_gbs)), title),
            _Column("busbw", "(GB/s)", 7, worth + 4, at(place, lambda row: rate(row.busbw_gbs)), title),
        ]
    columns.append(_Column("#wrong", "", 6, 30, wrong))
    spread = [
        _Column("p50", "(us)", 8, 3, first(lambda row: three(row.measured.p50_us)), "spread"),
        _Column("p99", "(us)", 8, 8, first(lambda row: three(row.measured.p99_us)), "spread"),
        _Column("max", "(us)", 8, 9, first(lambda row: three(row.measured.max_us)), "spread"),
        _Column("skew", "(us)", 8, 5, first(lambda row: three(row.measured.skew_us)), "spread"),
    ]
    columns += [column for column in spread if column.title != "p99" or settings.iters >= _FEWEST]
    return columns + ([_Column(versus, "", max(8, len(versus)), 40, _faster)] if versus else [])


def _faster(rows: Rows, group: _Group) -> str:
    ratio = None if rows[0].measured.library != OURS else _speed_up(rows, group.other)
    return "" if ratio is None else f"{ratio:.2f}x"


def _group(rows: Sequence[Rows]) -> _Group:
    ours = [row for row in rows if row[0].measured.library == OURS]
    others = [row for row in rows if row[0].measured.library != OURS]
    return _Group(min(ours, key=_time, default=None), min(others, key=_time, default=None))


def _time(rows: Rows) -> float:
    return min(row.time_us for row in rows)


def _speed_up(rows: Rows, other: Rows | None) -> float | None:
    """The time of `other` divided by the time of `rows`, both in place or both out of place."""
    if other is None:
        return None
    same = [row for row in rows if row.measured.place == other[0].measured.place] or rows
    return other[0].time_us / _time(tuple(same)) if _time(tuple(same)) > 0 else None


def three(value: float) -> str:
    """Microseconds."""
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 1e5 else f"{value:.0f}"


def rate(value: float) -> str:
    """1e9 bytes per second."""
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}" if value >= 1e-3 else f"{value:.1e}"


def summary(results: Results, settings: Settings) -> list[str]:
    """How much was measured, whether it was right, and the bandwidths of the best kernels, a line for each block."""
    header, rows = results.header, results.rows
    if not header:
        return ["nothing was measured"]
    measured = [row[0].measured for row in rows]
    kernels = len({(m.collective, m.algorithm, m.protocol) for m in measured})
    verdict = f"{results.wrong} wrong" if settings.check else "not checked"
    mark = f" ({SIMULATED})" if header["simulated"] else ""
    part = f" of {settings.rows}" if len(rows) < settings.rows else ""
    numbers = {"rank": header["ranks"], "kernel": kernels, "row": len(rows)}
    counts = ", ".join(f"{number} {name}{'s' * (number != 1)}" for name, number in numbers.items())
    lines = [f"{counts}{part}, {verdict}{mark}"]
    blocks = groupby(rows, key=block_of)
    return lines + [line for block, members in blocks for line in _bandwidths(block, list(members), header)]


def _bandwidths(block: str, rows: list[Rows], header: WorkerMessage) -> Iterator[str]:
    """Of the best kernel at each size: the average and largest bus bandwidth, its share of the links, the speed-up."""
    groups = [_group(list(members)) for _, members in groupby(rows, key=lambda row: row[0].measured.nbytes)]
    best = [min(group.best, key=lambda row: row.time_us) for group in groups if group.best is not None]
    if not best:
        return
    average, peak = mean(row.busbw_gbs for row in best), max(best, key=lambda row: row.busbw_gbs)
    links = machines.links_of(header["device"], json.loads(header["box"])["fingerprint"]["topology"])
    share = f", {peak.busbw_gbs / links:.0%} of the links' {links:g}" if links else ""
    yield (
        f"{block}: busbw of the fastest kernel (*) {rate(average)} GB/s on average, {rate(peak.busbw_gbs)} at most "
        f"({peak.measured.nbytes} B){share}"
    )
    ratios = [ratio for g in groups if g.best is not None and (ratio := _speed_up(g.best, g.other)) is not None]
    if ratios:
        others = " or ".join(dict.fromkeys(row[0].measured.library for row in rows if row[0].measured.library != OURS))
        slower = sum(ratio < 1 for ratio in ratios)
        least, most = (f"{edge(ratios):.2f}x" for edge in (min, max))
        speed = least if least == most else f"{least} to {most}"
        yield f"    {speed} as fast as {others}, slower at {slower} of {len(ratios)} sizes"
