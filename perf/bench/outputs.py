"""Where a benchmark's rows go beside the table: the history and CSV row by row, JSON when the run ends, however."""

from __future__ import annotations

import csv
import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tricomm.errors import InvalidArgument
from tricomm.perf import provenance
from tricomm.perf.bench.request import Settings
from tricomm.perf.bench.session import Results
from tricomm.perf.bench_row import PLACES
from tricomm.perf.history import database
from tricomm.perf.workers import WorkerMessage

_OF_ROW = (
    "library", "collective", "algorithm", "protocol", "dtype", "op", "mode", "size_bytes", "count", "ranks",
    "simulated", "blocks", "warps", "tile_words", "moved_bytes", "least_bytes", "hops", "barriers",
)  # fmt: skip
_OF_PLACE = (
    "time_us", "avg_us", "p50_us", "p99_us", "max_us", "skew_us", "slowest_rank", "algbw_gbs", "busbw_gbs", "wrong",
)  # fmt: skip


class Files:
    """Open files of one run; every row is in CSV and history when `row` returns, JSON is written by leaving.

    Raises `InvalidArgument` for a file that cannot be written, before anything is measured.
    """

    def __init__(
        self, settings: Settings, results: Results, json_file: Path | None, csv_file: Path | None,
        record: database.History | None,
    ) -> None:  # fmt: skip
        self._settings, self._results, self._json, self._history = settings, results, json_file, record
        self._open = ExitStack()
        self._csv: Any = None
        try:
            if json_file is not None and not os.access(json_file.parent, os.W_OK):
                raise InvalidArgument(f"--json {json_file}: its directory is not there or cannot be written")
            if csv_file is not None:
                self._stream = self._open.enter_context(csv_file.open("w", newline=""))
                self._csv = csv.writer(self._stream)
                self._csv.writerow([*_OF_ROW, "place", *_OF_PLACE])
        except OSError as error:
            raise InvalidArgument(f"--csv {csv_file}: {error.strerror}") from None
        self._run: database.Run | None = None

    def header(self, header: WorkerMessage) -> None:
        """What the rows of the history have in common."""
        self._run = database.Run(
            database.now(),
            header["device"],
            header["topology"],
            header["ranks"],
            header["versions"],
            provenance.commit(),
        )

    def row(self, row: WorkerMessage) -> None:
        """Write a merged row."""
        for place in PLACES:
            if row[place] is None:
                continue
            if self._csv is not None:
                self._csv.writerow([row.get(n, "") for n in _OF_ROW] + [place] + [row[place][n] for n in _OF_PLACE])
                self._stream.flush()
            if self._history is not None and self._run is not None:
                self._history.append(self._run, _measurement(row, place))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._json is not None:
            partial = self._json.with_name(f"{self._json.name}.part")
            partial.write_text(json.dumps(self._results.to_json(self._settings), indent=1) + "\n")
            os.replace(partial, self._json)
        if self._history is not None:
            self._history.close()
        self._open.close()


def _measurement(row: WorkerMessage, place: str) -> database.Measurement:
    times = {name: row[place][name] for name in ("p50_us", "p99_us", "max_us", "skew_us")}
    names = ("library", "collective", "algorithm", "protocol", "dtype", "op", "mode", "simulated")
    shape = {"blocks": row.get("blocks", 0), "warps": row.get("warps", 0), "tile": row.get("tile_words", 0)}
    facts_of_row = {name: row[name] for name in names}
    return database.Measurement(**facts_of_row, **times, **shape, place=place, nbytes=row["size_bytes"])
