"""Two runs of `tricomm bench` compared: of the history, or of files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tricomm import typed_json
from tricomm.errors import InvalidArgument
from tricomm.perf import parsing, text_table
from tricomm.perf.bench_row import PLACES, Measurement
from tricomm.perf.dashboard import changes, collect
from tricomm.perf.history import database, schema
from tricomm.perf.history.database import Entry, Say
from tricomm.perf.history.schema import Run

Rows = list[Entry]
_HEADER = ("run", "date", "commit", "rows", "ranks", "device")


def grouped(entries: Rows) -> list[Rows]:
    """The rows of each run, in the order of writing."""
    runs: dict[tuple[object, ...], Rows] = {}
    for entry in entries:
        run = entry.run
        runs.setdefault((run.date, run.commit, run.device, run.topology, run.world_size), []).append(entry)
    return list(runs.values())


def table(runs: dict[str, Rows]) -> list[str]:
    """A line for each run and its name."""
    lines = []
    for name, rows in runs.items():
        run, simulated = rows[-1].run, any(row.measurement.simulated for row in rows)  # Gloo's rows never are
        mark = " (simulated)" if simulated else ""
        lines.append((name, run.date or "-", run.commit or "-", len(rows), run.world_size, f"{run.device}{mark}"))
    return text_table.lines(_HEADER, lines, right=("run", "rows", "ranks"))


def side(text: str, runs: Sequence[Rows], say: Say) -> Rows:
    """The rows that `text` names: a run by number, `latest~1`, a commit, a date or an age, or a file. No rows if the
    history has no run, or none as old as the date.

    Raises `InvalidArgument` for any other text that names no run.
    """
    file = Path(text)
    if file.is_file():
        if not (rows := _of_file(file, say)):
            raise InvalidArgument(f"{file} has no rows: nothing was measured")
        return rows
    if not runs:
        return []
    counted = re.fullmatch(r"latest(?:~(\d{1,5}))?", text)
    if counted or re.fullmatch(r"\d{1,5}", text):
        place = len(runs) - 1 - int(counted[1] or 0) if counted else int(text) - 1
        found = [run for number, run in enumerate(runs) if number == place]
    elif re.fullmatch(r"[0-9a-f]{6,40}\+?", text):
        found = [run for run in runs if run[0].run.commit.startswith(text)]
    else:
        try:
            _, end = parsing.parse_when(text)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{text}: neither a file nor a run, as `tricomm compare` lists them; {error}"
            ) from None
        past = [run for run in runs if run[0].run.date < end]
        return [entry for run in past if run[0].run.date[:10] == past[-1][0].run.date[:10] for entry in run]
    if not found:
        raise InvalidArgument(f"{text}: the history has no such run; `tricomm compare` lists the runs")
    return [entry for run in found for entry in run]


def _of_file(file: Path, say: Say) -> Rows:
    """The latest run of another history, or the rows of a file of `tricomm bench --json`."""
    try:
        if schema.is_history(file):
            return _of_history(file, say)
        bench = json.loads(file.read_bytes())
        header, results = bench["header"], bench["results"]
        run = typed_json.convert({**header, "date": "", "world_size": header["ranks"]}, Run)
        return [
            Entry(
                run, typed_json.convert({**row, **row[place], "place": place, "nbytes": row["size_bytes"]}, Measurement)
            )
            for row in results
            for place in PLACES
            if row[place] is not None
        ]
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}") from None
    except InvalidArgument:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArgument(f"{file} is neither a history nor a file of `tricomm bench --json`: {error}") from None


def _of_history(file: Path, say: Say) -> Rows:
    said: list[str] = []
    history = database.open_history(file, said.append, replaced=False)
    if history is None:
        raise InvalidArgument(said[-1])
    with history:
        rows = [entry for run in grouped(history.read())[-1:] for entry in run]
    for text in said:
        say(text)
    return rows


def compare(old: Rows, new: Rows) -> list[changes.Changed]:
    """The points that both have, by their medians; what got slower most comes first."""
    both = [replace(e, run=replace(e.run, date=str(n), commit="")) for n, rows in enumerate((old, new)) for e in rows]
    data = collect.page_data(both)
    shared = [
        changes.Changed(point, *line["past"][place])
        for point, line, place in changes.points(data)
        if len(line["run"][place]) == 2
    ]
    return sorted(shared, key=lambda change: -change.step)
