"""The history of measurements: one SQLite file in the XDG data directory, for charts and for finding regressions.

Every measurement is a transaction, so that a run that is cut off loses nothing. A file that cannot be read is kept
under another name, and one of a newer tricomm is left alone; a new file is made in both cases. A measurement never
fails because of the history: if nothing can be written, a message says so once.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from tricomm import env, typed_json
from tricomm.errors import InvalidArgument
from tricomm.perf.bench_row import Measurement
from tricomm.perf.history import schema
from tricomm.perf.history.schema import ACTIVITY, MEASUREMENT, RUN, ActivityRow, Run
from tricomm.store import files

_LARGEST = (1 << 63) - 1  # of SQLite's integers
_ENDS = ("", "-wal", "-shm", "-journal")
_LOCK_SECONDS = 10.0  # for another process to finish its row
Say = Callable[[str], None]
_Row = TypeVar("_Row", Run, Measurement)


@dataclass(frozen=True)
class Entry:
    """A row of the history: a measurement, and its run."""

    run: Run
    measurement: Measurement


def default_path() -> Path:
    """`history.sqlite` in the XDG data directory."""
    return env.user_folder("XDG_DATA_HOME", ".local/share") / "history.sqlite"


def now() -> str:
    """The date of a run that begins now: UTC, to the second, in a form that sorts."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class History:
    """An open history file; made by `open_history`."""

    def __init__(self, path: Path, database: sqlite3.Connection, say: Say) -> None:
        self.path = path
        self._database, self._say = database, say
        self._lost = False

    def append(self, run: Run, measurement: Measurement) -> bool:
        """Write a row, which is on the disk when this returns. False if that is impossible; a message says so once.

        Raises `InvalidArgument` for a value that is no measurement (a time that is not a number).
        """
        if self._lost:
            return False
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.execute(MEASUREMENT.insert, (self._number(run), *astuple(measurement)))
            return True
        except sqlite3.IntegrityError as error:
            raise InvalidArgument(f"history: {measurement} cannot be recorded: {error}") from None
        except sqlite3.Error as error:
            self._lost = True
            self._say(f"history {self.path}: {error}; going on without it")
            return False

    def _number(self, run: Run) -> int:
        facts = {**vars(run), "versions": json.dumps(run.versions, sort_keys=True)}
        values = tuple(facts[name] for name in RUN.names)
        known = self._database.execute(schema.SAME_RUN, values).fetchone()
        if known is None:
            known = (self._database.execute(RUN.insert, (None, *values)).lastrowid,)
        return int(known[0])

    def read(self) -> list[Entry]:
        """Rows in the order of writing. Raises `sqlite3.DatabaseError` for a file that broke after it was opened."""
        runs: dict[int, Run | None] = {}
        entries = [_entry(row, runs) for row in self._database.execute(f"{schema.ROWS} ORDER BY measurements.rowid")]
        known = [entry for entry in entries if entry is not None]
        if len(known) < len(entries):
            self._say(f"history {self.path}: {len(entries) - len(known)} rows are no measurements and are left out")
        return known

    def keep(self, rows: list[ActivityRow]) -> bool:
        """Write the activity of jobs; a row replaces the older one of its key. False, with a message, if that fails."""
        values = [tuple(min(v, _LARGEST) if isinstance(v, int) else v for v in astuple(row)) for row in rows]
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(ACTIVITY.insert.replace("INSERT", "INSERT OR REPLACE", 1), values)
            return True
        except sqlite3.Error as error:
            self._say(f"history {self.path}: {error}; what jobs did is not in it")
            return False

    def activities(self) -> list[ActivityRow]:
        """The activity of jobs, oldest first."""
        rows = self._database.execute(f"SELECT {', '.join(ACTIVITY.quoted)} FROM activity ORDER BY date, rowid")
        return [ActivityRow(**ACTIVITY.values(row)) for row in rows]

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM measurements").fetchone()[0])

    def close(self) -> None:
        """Idempotent."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _entry(row: tuple[Any, ...], runs: dict[int, Run | None]) -> Entry | None:
    """None if the row has values that `append` never writes: tables made by another program may accept them."""
    number, *values = row
    of_run = len(RUN.names)
    if number not in runs:
        facts = RUN.values(values[:of_run])
        try:
            facts["versions"] = json.loads(facts["versions"])
        except (ValueError, TypeError):  # SQLite's pages have no checksum
            facts["versions"] = {"damaged": str(facts["versions"])}
        runs[number] = _checked(facts, Run)
    run, measured = runs[number], _checked(MEASUREMENT.values(values[of_run:]), Measurement)
    if run is None or measured is None or measured.nbytes < 0:
        return None
    times = (measured.p50_us, measured.p99_us, measured.max_us, abs(measured.skew_us))
    return Entry(run, measured) if all(0 <= time < math.inf for time in times) else None


def _checked(values: dict[str, Any], kind: type[_Row]) -> _Row | None:
    try:
        return typed_json.convert(values, kind)
    except ValueError:
        return None


def open_history(path: Path | None = None, say: Say = lambda text: None, replaced: bool = True) -> History | None:
    """The history in `path` [default: `default_path()`], a new one if there is none; None if that is impossible.

    If the file cannot be used, it is replaced and `say` is called with a message that names the new file; unless
    `replaced`, it is left unchanged and the result is None.
    """
    path = default_path() if path is None else path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path == default_path():
            files.check_directory(path.parent)
        with files.locked(f"{path}.lock", _LOCK_SECONDS):
            return _opened(path, say, replaced)
    except (OSError, sqlite3.OperationalError) as error:
        say(f"history {path}: {getattr(error, 'strerror', None) or error}; going on without it")
        return None


def _opened(path: Path, say: Say, replaced: bool) -> History | None:
    try:
        return History(path, _ready(path), say)
    except schema.TooNew as newer:
        text = f"history {path} is of version {newer.version}, this tricomm knows {schema.VERSION}; it stays as it is"
        if not replaced:
            say(text)
            return None
        beside = path.with_suffix(f".v{schema.VERSION}{path.suffix}")
        say(f"{text}, rows go to {beside}")
        return History(beside, _ready(beside), say)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not schema.broken(error):
            raise
        text = f"history {path} cannot be read: {error}"
        if not replaced:
            say(text)
            return None
        say(f"{text}; it is kept as {_set_aside(path)}, a new one is begun")
        return History(path, _ready(path), say)


def _ready(path: Path) -> sqlite3.Connection:
    """A connection to a history of this version. Raises `sqlite3.DatabaseError` for another file or a broken one."""
    for end in _ENDS:
        if not end or os.path.lexists(f"{path}{end}"):
            files.opened(f"{path}{end}", "ab").close()  # SQLite would follow a link, and accept another user's rows
    with ExitStack() as undo:
        database = undo.enter_context(closing(sqlite3.connect(path, timeout=_LOCK_SECONDS, isolation_level=None)))
        database.text_factory = lambda raw: raw.decode(errors="replace")
        schema.check(database)
        # Readers do not wait for writers; a row is on the disk before `append` returns.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        schema.migrate(database)
        undo.pop_all()
        return database


def _set_aside(path: Path) -> Path:
    stamp = now().replace(":", "").replace("+0000", "")
    kept = path.with_name(f"{path.stem}.broken-{stamp}-{os.getpid()}{path.suffix}")
    for end in _ENDS:
        if Path(f"{path}{end}").exists():
            os.replace(f"{path}{end}", f"{kept}{end}")
    return kept
