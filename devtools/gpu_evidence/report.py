"""The journal of a run, and the summary and the archive that are made from it."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from devtools.gpu_evidence.steps import Step

JOURNAL, SUMMARY, ARCHIVE, LOG = "journal.jsonl", "summary.md", "evidence.tar.gz", "log.txt"
GOOD = ("passed", "skipped")
_NOT_COMPARED = ("date", "commit")  # the hash of the sources identifies the code, with or without a commit
_OURS = "tricomm"
_FRAME = (
    "On one GPU the ranks share its memory: times show kernels, memory and launches, not NVLink. Compare rows of one "
    "step only. Processes on one GPU take turns in slices of time, which dominate their times."
)
_RATIO = "Ratio: the library's median time over tricomm's; above 1, tricomm is faster."
Record = dict[str, Any]


class Journal:
    """JSON lines, written by the driver and its children: the environment, and every test, step and row that ended.

    `tests` and `steps` have the last record by name, `rows` the benchmark's rows by step, and `selected` the tests of
    a step.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / JOURNAL
        self._clear()
        self.read()

    def _clear(self) -> None:
        self._at, self.run = 0, 0
        self.environment: Record = {}
        self.tests: dict[str, Record] = {}
        self.steps: dict[str, Record] = {}
        self.rows: dict[str, list[Record]] = {}
        self.notes: dict[str, None] = {}
        self.selected: dict[str, list[str]] = {}
        self.running: str | None = None
        self.stopped = False

    def read(self) -> None:
        """Read the lines that were added. An incomplete line at the end is read later; one in between is ignored."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue

    def _take(self, line: Record) -> None:
        match line["event"]:
            case "run":
                self.run, self.environment, self.running = line["run"], line["environment"], None
            case "selected":
                self.selected[line["step"]], self.stopped, self.running = line["tests"], False, None
            case "begin":
                self.running = line["test"]
            case "test":
                self.tests[line["test"]], self.running = line, None
            case "stopped":
                self.stopped = True
            case "step":
                self.steps[line["step"]] = line
            case "bench":
                self.rows[line["step"]] = []
            case "row":
                self.rows[line["step"]].append(line["row"])
            case "note":
                self.notes[line["text"]] = None

    def write(self, event: str, **fields: Any) -> None:
        """Append a line and read it back."""
        append(self.path, event, **fields)
        self.read()

    def start(self, environment: Record) -> str:
        """Begin a run: continue a journal of the same environment, or rename a journal of another one. Returns a text
        about this."""
        known = {**self.environment, **environment}
        changed = [n for n in known if n not in _NOT_COMPARED and self.environment.get(n) != environment.get(n)]
        note = ""
        if self.path.exists() and changed:
            old = self.path.with_name(f"journal-{len(list(self.folder.glob('journal-*.jsonl'))) + 1}.jsonl")
            self.path.rename(old)
            self._clear()
            note = f"starts anew, because {', '.join(changed)} changed; {old.name} has the earlier results"
        elif self.run:
            note = f"continues after {len(self.tests)} tests of {self.run} earlier run(s)"
        self.write("run", run=self.run + 1, environment=environment)
        return note

    def ended(self, test: str) -> bool:
        """True for a test that this run does not repeat: it has passed, was skipped, or failed in this run."""
        record = self.tests.get(test)
        return record is not None and (record["outcome"] in GOOD or record["run"] == self.run)

    def waiting(self, step: str) -> list[str]:
        """The selected tests of a step that have not ended."""
        return [test for test in self.selected.get(step, ()) if not self.ended(test)]

    def failures(self, step: str) -> list[Record]:
        """The records of a step's tests that failed."""
        records = (self.tests[test] for test in self.selected.get(step, ()) if test in self.tests)
        return [record for record in records if record["outcome"] not in GOOD]


def append(path: Path, event: str, **fields: Any) -> None:
    """Append a line to the journal and wait until the disk has it."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            broken = file.read(1) != b"\n"  # by a process that was killed
            file.write(b"\n" if broken else b"")
        file.write(json.dumps({"event": event, **fields}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write(journal: Journal, steps: Sequence[Step]) -> None:
    """Write the summary and the archive of everything in the folder."""
    folder = journal.folder
    (folder / SUMMARY).write_text("\n".join(_summary(journal, steps)) + "\n", encoding="utf-8")
    part = folder / f"{ARCHIVE}.part"
    with tarfile.open(part, "w:gz") as archive:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".md", ".jsonl", ".json", ".txt"):
                archive.add(path, path.name)
    part.replace(folder / ARCHIVE)


def _summary(journal: Journal, steps: Sequence[Step]) -> Iterator[str]:
    yield from ("# GPU evidence", "", _where(journal.environment), "", _FRAME, "")
    yield from _table(("step", "result", "passed", "failed", "skipped", "not run", "seconds", ""))
    for step in steps:
        record = journal.steps.get(step.name, {"outcome": "not run", "seconds": 0.0, "reason": ""})
        outcomes = [journal.tests[t]["outcome"] for t in journal.selected.get(step.name, ()) if t in journal.tests]
        passed, skipped = outcomes.count("passed"), outcomes.count("skipped")
        counts = (passed, len(outcomes) - passed - skipped, skipped, len(journal.waiting(step.name)))
        yield _row(step.name, record["outcome"], *counts, f"{record['seconds']:.0f}", record["reason"])
    yield from ("", "## Failures", "")
    bad = [record for record in journal.tests.values() if record["outcome"] not in GOOD]
    yield from (f"* `{r['test']}`: {r['outcome']}: {_cell(r['reason'])}" for r in bad)
    yield from () if bad else ("none",)
    names = ("step", "collective", "bytes", "mode", "library", "p50 us", "GB/s", "ratio")
    yield from ("", "## Rows of the benchmark", "", _RATIO, "", *_table(names))
    for name, rows in journal.rows.items():
        yield from (_row(name, *cells) for cells in bench_cells(rows))
    yield from (f"* {_cell(note)}" for note in journal.notes)
    yield from ("", "## Numbers of the tests", "", *_table(("test", "numbers")))
    for test, record in journal.tests.items():
        if record["data"]:
            numbers = ", ".join(f"{name} {_number(value)}" for name, value in record["data"].items())
            yield _row(test.rpartition("/")[2], numbers)
    yield from ("", "## Not run", "", *(f"* {line}" for line in journal.environment.get("left_out", ())))
    for step in steps:
        if waiting := journal.waiting(step.name):
            yield f"* {step.name}, {len(waiting)}: {'; '.join(test.rpartition('::')[2] for test in waiting)}"
        elif step.name not in journal.steps or journal.steps[step.name]["outcome"] == "cut":
            yield f"* {step.name}: {'cut off' if step.name in journal.steps else 'not started'}"


def _where(it: Record) -> str:
    devices = it.get("device") or ["no GPU"]
    versions = ", ".join(f"{name} {version}" for name, version in it.get("versions", {}).items())
    code = f"commit {it.get('commit')}, sources {str(it.get('sources'))[:12]}"
    return f"{it.get('date')}, {len(devices)} x {devices[0]}, driver {it.get('driver')}, {code}, {versions}"


def bench_cells(rows: Sequence[Record]) -> Iterator[tuple[Any, ...]]:
    """The table cells of a step's rows: each library at its first place, with the ratio to tricomm's call."""
    call = ("collective", "dtype", "op", "mode", "size_bytes")
    ours: dict[tuple[Any, ...], Record] = {}
    for row in rows:
        if row["library"] == _OURS:
            ours.setdefault(tuple(row[name] for name in call), row)
    for row in rows:
        place = next(p for p in ("out_of_place", "in_place") if row[p] is not None)
        base = ours.get(tuple(row[name] for name in call))
        ratio = ""
        if base is not None and row["library"] != _OURS:
            ratio = (
                f"{row[place]['p50_us'] / ((base[place] or base['in_place'] or base['out_of_place'])['p50_us']):.2f}"
            )
        way = row["algorithm"] if row["protocol"] == "-" else f"{row['algorithm']}/{row['protocol']}"
        times = (_number(row[place]["p50_us"]), _number(row[place]["busbw_gbs"]))
        yield (row["collective"], row["size_bytes"], row["mode"], f"{row['library']} {way}", *times, ratio)


def _table(names: Sequence[str]) -> tuple[str, str]:
    return _row(*names), "|---" * len(names) + "|"


def _row(*cells: Any) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())[:400]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
