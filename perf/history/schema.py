"""The tables of a history file, version by version; their columns are the fields of dataclasses.

`user_version` counts the steps that have been taken; a file of an older version takes the others when it is opened.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.perf.bench_row import Measurement

APPLICATION = 0x7472636D  # "trcm", in the file's header: the program that it belongs to
_TYPES = {"str": "TEXT", "int": "INTEGER", "bool": "INTEGER", "float": "REAL", "dict[str, str]": "TEXT"}


@dataclass(frozen=True)
class Run:
    """The facts that the rows of one run share. `versions` and `commit` are of the loaded code, `date` is UTC. `box`
    has the facts for selection (`tricomm.perf.box`); empty: they were not recorded."""

    date: str
    device: str
    topology: str
    world_size: int
    versions: dict[str, str]
    commit: str = ""
    box: str = ""


@dataclass(frozen=True)
class ActivityRow:
    """The calls of one kernel and bucket of sizes by a process (`job`), as in `tricomm.metrics.counters.Calls`.

    `route` is kernels, nccl or gloo; the last two are counted for a process, so `rank` is -1 and `group` is empty.
    """

    job: str
    date: str
    device: str
    group: str
    rank: int
    world_size: int
    simulated: bool
    route: str
    collective: str
    algorithm: str
    protocol: str
    bucket: int
    calls: int
    nbytes: int
    timed: int = 0
    seconds: float = 0.0
    p50_us: float | None = None
    p99_us: float | None = None


@dataclass(frozen=True)
class SqlTable:
    """A table with a column for each field of `row`, after the columns `first`; `last` are its constraints. A step adds
    the columns `later` to it."""

    name: str
    row: type[Any]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self.row))

    @cached_property
    def quoted(self) -> tuple[str, ...]:
        return tuple(f'"{name}"' for name in self.names)

    @property
    def create(self) -> str:
        columns = [f'"{f.name}" {_declared(f.type)}' for f in fields(self.row) if f.name not in self.later]
        return f"CREATE TABLE {self.name} ({', '.join((*self.first, *columns, *self.last))}) STRICT;"

    @cached_property
    def insert(self) -> str:
        """The INSERT statement for the values of the columns `first` and then of a row."""
        marks = "?" * (len(self.first) + len(self.names))
        columns = ", ".join((*(column.split()[0] for column in self.first), *self.quoted))
        return f"INSERT INTO {self.name} ({columns}) VALUES ({', '.join(marks)})"

    def values(self, row: Sequence[Any]) -> dict[str, Any]:
        """A row of the file by field."""
        return {n: bool(v) if n in self._flags else v for n, v in zip(self.names, row, strict=True)}

    @cached_property
    def _flags(self) -> frozenset[str]:
        return frozenset(f.name for f in fields(self.row) if f.type == "bool")


def _declared(annotation: Any) -> str:
    kind, _, optional = str(annotation).partition(" | ")
    return _TYPES[kind] + ("" if optional else " NOT NULL")


RUN = SqlTable("runs", Run, ("id INTEGER PRIMARY KEY",), later=("box",))
MEASUREMENT = SqlTable("measurements", Measurement, ("run INTEGER NOT NULL REFERENCES runs",))
_KEY = 'PRIMARY KEY (job, "group", rank, route, collective, algorithm, protocol, bucket)'
ACTIVITY = SqlTable("activity", ActivityRow, (), (_KEY,))
_BOX = "ALTER TABLE runs ADD COLUMN box TEXT NOT NULL DEFAULT '';"
_STEPS = (RUN.create + MEASUREMENT.create, ACTIVITY.create, _BOX)
VERSION = len(_STEPS)

_COLUMNS = ", ".join(f"{table.name}.{quoted}" for table in (RUN, MEASUREMENT) for quoted in table.quoted)
ROWS = f"SELECT runs.id, {_COLUMNS} FROM measurements JOIN runs ON runs.id = measurements.run"
SAME_RUN = f"SELECT id FROM runs WHERE {' AND '.join(f'{name} = ?' for name in RUN.quoted)}"


class TooNew(Exception):
    """The file is of a version that this tricomm does not know."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def check(database: sqlite3.Connection) -> None:
    """Raise `sqlite3.DatabaseError` for a file that is broken or no history, `TooNew` for one of a newer tricomm."""
    (tables,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        return
    (application,) = database.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION:
        raise sqlite3.DatabaseError("it is another program's database")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise TooNew(version)
    (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(" ".join(verdict.split()))


def is_history(path: Path) -> bool:
    """True if the file begins like a history, even a damaged one, or like one whose first rows are still only in its
    log."""
    with path.open("rb") as file:
        head = file.read(72)
    application, log = int.from_bytes(head[68:72], "big"), Path(f"{path}-wal")
    begun = application == 0 and log.exists() and log.stat().st_size > 0
    return head[:16] == b"SQLite format 3\0" and (application == APPLICATION or begun)


def check_file(path: Path) -> None:
    """Raise `InvalidArgument` unless `path` is a file that begins as a history does."""
    if not path.is_file():
        raise InvalidArgument(f"--history {path}: there is no such file")
    if not is_history(path):
        raise InvalidArgument(f"--history {path}: this is no history of tricomm; `tricomm bench` writes one")


def broken(error: Exception) -> bool:
    """True if the file is damaged; False if it is locked, read-only or on a full disk.

    SQLite quotes the damaged bytes in a message, which raises `UnicodeDecodeError`.
    """
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode == sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError)


def migrate(database: sqlite3.Connection) -> None:
    """Apply the steps that the file lacks, each in a transaction."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    for number, step in enumerate(_STEPS[version:], version + 1):
        begin = f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION};"
        database.executescript(f"{begin} {step} PRAGMA user_version = {number}; COMMIT;")
    database.execute(f"{ROWS} LIMIT 1").fetchall()  # the columns are those that this version knows
