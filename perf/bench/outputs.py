"""Where the rows of a benchmark go: the history, CSV, JSON, and a table with nccl-tests' columns and a progress bar."""

from __future__ import annotations

import csv
import json
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tricomm.errors import InvalidArgument
from tricomm.perf import provenance, text_table
from tricomm.perf.bench.measure import Rows
from tricomm.perf.bench.request import Settings
from tricomm.perf.bench.session import Results
from tricomm.perf.bench_row import CSV_HEADER, PLACES, BenchRow
from tricomm.perf.history import database, schema
from tricomm.perf.workers import WorkerMessage
from tricomm.store import files

STANDARD = Path("-")  # standard output instead of a file
SIMULATED = "simulated: Triton's interpreter on a CPU"
_NAMES = (("type", 8), ("redop", 5), ("mode", 6), ("algorithm", 9), ("protocol", 8))
_HALF = (("time", 10, "(us)"), ("algbw", 8, "(GB/s)"), ("busbw", 8, "(GB/s)"), ("#wrong", 7, ""))
_SPREAD = (*((name, 10, "(us)") for name in ("p50", "p99", "max", "skew")), ("sent", 6, "(opt.)"), ("hops", 4, ""))
_COLUMNS = (
    ("size", 12, "(B)"),
    ("count", 10, "(elements)"),
    *((name, width, "") for name, width in _NAMES),
    *_HALF,
    *_HALF,
    *_SPREAD,
)


class Files:
    """Open files of one run. A row is in CSV and history when `row` returns; JSON is written at the end, however.

    Raises `InvalidArgument` for a file that cannot be written, or if both are `STANDARD`, before anything is measured.
    """

    def __init__(
        self,
        settings: Settings,
        results: Results,
        json_file: Path | None,
        csv_file: Path | None,
        history: database.History | None,
    ) -> None:
        self._settings, self._results, self._json, self._history = settings, results, json_file, history
        self._open = ExitStack()
        self._csv: Any = None
        self._run: schema.Run | None = None
        if json_file == csv_file == STANDARD:
            raise InvalidArgument("--json - and --csv -: one of them can go to standard output; give the other a file")
        try:
            if json_file not in (None, STANDARD) and not os.access(json_file.parent, os.W_OK):
                raise InvalidArgument(f"--json {json_file}: its directory is not there or cannot be written")
            if csv_file is not None:
                file = nullcontext(sys.stdout) if csv_file == STANDARD else csv_file.open("w", newline="")
                self._stream = self._open.enter_context(file)
                self._csv = csv.DictWriter(self._stream, CSV_HEADER)
                self._csv.writeheader()
        except OSError as error:
            raise InvalidArgument(f"--csv {csv_file}: {error.strerror}") from None

    def header(self, header: WorkerMessage) -> None:
        """Take the facts that all rows of the history share."""
        facts = {name: header[name] for name in ("device", "topology", "versions", "box")}
        self._run = schema.Run(database.now(), **facts, world_size=header["ranks"], commit=provenance.commit())

    def row(self, rows: Rows) -> None:
        """Write the merged rows of a call."""
        for row in rows:
            if self._csv is not None:
                self._csv.writerow(row.columns())
                self._stream.flush()
            if self._history is not None and self._run is not None:
                self._history.append(self._run, row.measured)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._json is not None:
                self._write_json(self._json)
        finally:
            if self._history is not None:
                self._history.close()
            self._open.close()

    def _write_json(self, file: Path) -> None:
        text = json.dumps(self._results.to_json(self._settings), indent=1) + "\n"
        if file == STANDARD:
            sys.stdout.write(text)
        else:
            files.replace(file, text.encode())


class Output:
    """Prints rows as they come. `quiet`: nothing at all (a rank other than 0). `joined`: torchrun started the ranks.
    `aside`: to standard error, because `Files` have standard output."""

    def __init__(self, settings: Settings, quiet: bool, joined: bool, aside: bool = False) -> None:
        self._console = Console(stderr=aside, quiet=quiet, highlight=False, markup=False, soft_wrap=True)
        self._settings = settings
        self._collective = ""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        hidden = quiet or not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=hidden)
        total = settings.rows
        self._task = self._progress.add_task("joining the ranks" if joined else "starting the ranks", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the progress bar away. May be called twice."""
        self._progress.stop()

    def header(self, header: WorkerMessage) -> None:
        """Print the head of the table."""
        for text in heading(header, self._settings):
            self._console.print(text)

    def row(self, rows: Rows) -> None:
        """Print a row and move the bar on."""
        measured = rows[0].measured
        if measured.collective != self._collective:
            self._collective = measured.collective
            self._console.print(f"#\n# {self._collective}")
        self._console.print(line(rows))
        names = f"{measured.collective} {measured.algorithm}/{measured.protocol}"
        self._progress.update(self._task, advance=1, description=names)

    def note(self, text: str) -> None:
        """Print why something is not compared."""
        self._console.print(f"# {text}")

    def summary(self, results: Results) -> None:
        """Print the last line."""
        self._console.print(f"\n{summary(results, self._settings)}")


def heading(header: WorkerMessage, settings: Settings) -> list[str]:
    """Comment lines, from `# tricomm bench` down to the column names."""
    versions = ", ".join(f"{name} {value}" for name, value in header["versions"].items())
    lines = [
        "tricomm bench" + (f" ({SIMULATED}; no time here says anything about a GPU)" if header["simulated"] else ""),
        f"device    {header['device']}",
        f"topology  {header['topology']}",
        f"ranks     {header['ranks']}, memory shared by {header['kind']}",
        f"versions  {versions}",
        f"calls     {settings.warmup} warm-up, {settings.iters} timed back to back; time is the slowest rank's",
        "spread    of the slowest rank's calls (in place if there is no other); skew: its median less the fastest's",
        "sent      bytes to and from peers over the least that any algorithm needs; hops: dependent one-way messages",
        f"check     {'2 calls of their own per row and place, exact' if settings.check else 'off'}",
        "",
    ]
    groups = [_line(_spanning("out-of-place", "in-place", "spread"), "#")]
    names = [_line([column[at] for column in _COLUMNS], "#") for at in (0, 2)]
    return [*(f"# {line}".rstrip() for line in lines), *groups, *names]


def _spanning(*titles: str) -> list[str]:
    """A cell for each column, with a title above the first column of each group."""
    cells = [""] * len(_COLUMNS)
    first = len(_COLUMNS) - len(_SPREAD) - 2 * len(_HALF)
    for title, width in zip(titles, (len(_HALF), len(_HALF), len(_SPREAD)), strict=True):
        cells[first] = title
        first += width
    return cells


def line(rows: Rows) -> str:
    """The rows of a call, aligned under `heading`."""
    first, measured = rows[0], rows[0].measured
    places = {row.measured.place: row for row in rows}
    sent = f"{(first.moved_bytes or 0) / first.least_bytes:.2f}" if first.least_bytes else "-"
    cells = [
        measured.nbytes,
        first.count,
        *(measured.dtype, measured.op, measured.mode, measured.algorithm, measured.protocol),
        *(cell for place in PLACES for cell in _half(places.get(place))),
        *map(_three, (measured.p50_us, measured.p99_us, measured.max_us, measured.skew_us)),
        *(sent, "-" if first.hops is None else first.hops),
    ]
    return _line(cells, "")


def _line(cells: list[Any], mark: str) -> str:
    """One line of the table: cells to the right, no narrower than their columns, however wide the terminal is."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(min_width=1)
    for _, width, _ in _COLUMNS:
        table.add_column(justify="right", min_width=width, no_wrap=True)
    return text_table.rendered(table, [(mark, *cells)])[0]


def _half(row: BenchRow | None) -> tuple[str, ...]:
    if row is None:
        return ("-",) * len(_HALF)
    wrong = "n/a" if row.wrong is None else str(row.wrong)
    return _three(row.time_us), _rate(row.algbw_gbs), _rate(row.busbw_gbs), wrong


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 1e6 else f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}" if value >= 1e-3 else f"{value:.1e}"


def summary(results: Results, settings: Settings) -> str:
    """The last line: how much was measured, and whether it was right."""
    header, rows = results.header, results.rows
    if not header:
        return "nothing was measured"
    measured = [row[0].measured for row in rows]
    kernels = len({(m.collective, m.algorithm, m.protocol) for m in measured})
    verdict = f"{results.wrong} wrong" if settings.check else "not checked"
    mark = f" ({SIMULATED})" if header["simulated"] else ""
    part = f" of {settings.rows}" if len(rows) < settings.rows else ""
    return f"{header['ranks']} ranks, {kernels} kernels, {len(rows)} rows{part}, {verdict}{mark}"
