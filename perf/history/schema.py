"""The tables of a history file, version by version.

`user_version` counts the steps that have been taken; a file of an older version takes the others when it is opened.
"""

from __future__ import annotations

import sqlite3

APPLICATION = 0x7472636D  # "trcm", in the file's header: whose it is
_STEPS = (
    """
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY, date TEXT NOT NULL, device TEXT NOT NULL, topology TEXT NOT NULL,
        world_size INTEGER NOT NULL, versions TEXT NOT NULL, "commit" TEXT NOT NULL
    ) STRICT;
    CREATE TABLE measurements (
        run INTEGER NOT NULL REFERENCES runs, library TEXT NOT NULL, collective TEXT NOT NULL,
        algorithm TEXT NOT NULL, protocol TEXT NOT NULL, dtype TEXT NOT NULL, op TEXT NOT NULL, mode TEXT NOT NULL,
        place TEXT NOT NULL, nbytes INTEGER NOT NULL, p50_us REAL NOT NULL, p99_us REAL NOT NULL, max_us REAL NOT NULL,
        skew_us REAL NOT NULL, simulated INTEGER NOT NULL, blocks INTEGER NOT NULL, warps INTEGER NOT NULL,
        tile INTEGER NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE activity (
        job TEXT NOT NULL, date TEXT NOT NULL, device TEXT NOT NULL, "group" TEXT NOT NULL, rank INTEGER NOT NULL,
        world_size INTEGER NOT NULL, simulated INTEGER NOT NULL, route TEXT NOT NULL, collective TEXT NOT NULL,
        algorithm TEXT NOT NULL, protocol TEXT NOT NULL, bucket INTEGER NOT NULL, calls INTEGER NOT NULL,
        nbytes INTEGER NOT NULL, timed INTEGER NOT NULL, seconds REAL NOT NULL, p50_us REAL, p99_us REAL,
        PRIMARY KEY (job, "group", rank, route, collective, algorithm, protocol, bucket)
    ) STRICT;
    """,
)
VERSION = len(_STEPS)

_OF_RUN = ("date", "device", "topology", "world_size", "versions", '"commit"')
_OF_MEASUREMENT = (
    "library", "collective", "algorithm", "protocol", "dtype", "op", "mode", "place", "nbytes", "p50_us", "p99_us",
    "max_us", "skew_us", "simulated", "blocks", "warps", "tile",
)  # fmt: skip
COLUMN = {name.strip('"'): f"runs.{name}" for name in _OF_RUN} | {n: f"measurements.{n}" for n in _OF_MEASUREMENT}
ROWS = f"SELECT runs.id, {', '.join(COLUMN.values())} FROM measurements JOIN runs ON runs.id = measurements.run"
ORDER = "ORDER BY measurements.rowid"
SAME_RUN = " AND ".join(f"{name} = ?" for name in _OF_RUN)
NEW_RUN = f"INSERT INTO runs ({', '.join(_OF_RUN)}) VALUES ({', '.join('?' * len(_OF_RUN))})"


class Newer(Exception):
    """The file is of a version that this tricomm does not know."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def check(database: sqlite3.Connection) -> None:
    """Raise `sqlite3.DatabaseError` for a file that is broken or no history, `Newer` for one of a newer tricomm."""
    (tables,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        return
    (application,) = database.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION:
        raise sqlite3.DatabaseError("it is another program's database")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise Newer(version)
    (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(" ".join(verdict.split()))


def broken(error: Exception) -> bool:
    """Whether the file is at fault, and not that it is locked, read-only or on a full disk.

    What SQLite cannot put in words comes as a `UnicodeDecodeError`: it quotes the damaged bytes.
    """
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode == sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError)


def migrate(database: sqlite3.Connection) -> None:
    """Take the steps that the file has not taken, each whole or not at all."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    for number, step in enumerate(_STEPS[version:], version + 1):
        begin = f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION};"
        database.executescript(f"{begin} {step} PRAGMA user_version = {number}; COMMIT;")
    database.execute(f"{ROWS} LIMIT 1").fetchall()  # the columns are those that this version knows
