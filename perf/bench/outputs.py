"""Writes the rows of a benchmark: to the history, to CSV and JSON files, and to a table with a progress bar."""

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

from tricomm.errors import InvalidArgument
from tricomm.perf import provenance
from tricomm.perf.bench import table
from tricomm.perf.bench.measure import Rows
from tricomm.perf.bench.request import Settings
from tricomm.perf.bench.session import Results
from tricomm.perf.bench.table import BenchTable
from tricomm.perf.bench_row import CSV_HEADER
from tricomm.perf.history import database, schema
from tricomm.perf.workers import WorkerMessage
from tricomm.store import files

STANDARD = Path("-")  # standard output instead of a file


class Files:
    """Open files of one run. A row is in CSV and history when `row` returns; JSON is written at the end, also after an
    error.

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
        """Set the facts that all rows of the history share."""
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
    """Prints rows when all of a size are measured. `quiet`: nothing at all (a rank other than 0). `joined`:
    torchrun started the ranks. `aside`: to standard error, because `Files` have standard output."""

    def __init__(self, settings: Settings, quiet: bool, joined: bool, aside: bool = False) -> None:
        self._console = Console(stderr=aside, quiet=quiet, highlight=False, markup=False, soft_wrap=True)
        self._settings = settings
        self._table: BenchTable | None = None
        self._waiting: list[Rows] = []  # rows of one size: the best is known only when all are complete
        self._block = ""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        terminal = self._console if self._console.is_terminal else Console(stderr=True)
        self.shows_bar = terminal.is_terminal and not quiet
        self._progress = Progress(*columns, console=terminal, transient=True, disable=not self.shows_bar)
        self._task = self._progress.add_task(
            "joining the ranks" if joined else "starting the ranks", total=settings.rows
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the progress bar. May be called twice."""
        self._progress.stop()

    @property
    def state(self) -> str:
        """How far the run is, in words."""
        task = self._progress.tasks[0]
        return f"{task.completed:.0f} of {self._settings.rows} rows; {task.description}"

    def header(self, header: WorkerMessage) -> None:
        """Print the head of the table."""
        width = self._console.width if self._console.is_terminal else table.WIDEST
        self._table = BenchTable(self._settings, header, width)
        self._progress.update(self._task, description="measuring the first row")
        self._print(self._table.heading())

    def row(self, rows: Rows) -> None:
        """Move the bar on, and print the rows of a size when they are complete."""
        measured = rows[0].measured
        if self._waiting and table.group_of(self._waiting[0]) != table.group_of(rows):
            self._flush()
        self._waiting.append(rows)
        cases = self._settings.cases_of(measured.collective, measured.dtype)
        if len(self._waiting) == len(cases) and not any(case.library in table.SEVERAL for case in cases):
            self._flush()
        names = f"{measured.collective} {table.kernel_of(rows)}, {measured.nbytes} B"
        self._progress.update(self._task, advance=1, description=names)

    def note(self, text: str) -> None:
        """Print why something is not compared."""
        self._print([f"# {text}"])

    def summary(self, results: Results) -> None:
        """Print the rows that are left, and the last lines."""
        self._flush()
        self._print(["", *table.summary(results, self._settings)])

    def _flush(self) -> None:
        if self._waiting and self._table is not None:
            rows, self._waiting = self._waiting, []
            block = table.block_of(rows[0])
            if block != self._block:
                self._print(["#", f"# {block}"])
            elif len(rows) > 1:
                self._print([""])
            self._block = block
            self._print(self._table.group(rows))

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            self._console.print(line)
