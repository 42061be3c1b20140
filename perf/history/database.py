"""The history of measurements: one SQLite file in the XDG data directory, for charts and for finding regressions.

Every measurement is committed by itself, so that a run that is cut off loses nothing. A file that cannot be read is
kept under another name, one of a newer tricomm is left where it is; a new one is begun in both cases. Measuring never
fails for the history's sake: where nothing can be written, that is said once.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import filelock
import platformdirs

from tricomm.errors import InvalidArgument
from tricomm.perf.history import schema as schema

_LARGEST = (1 << 63) - 1  # that SQLite holds
_PATIENCE = 10.0  # seconds for another process to finish its row
Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """What the rows of one run have in common. `versions` and `commit` are of what was loaded, `date` is UTC."""

    date: str
    device: str
    topology: str
    world_size: int
    versions: dict[str, str]
    commit: str = ""


@dataclass(frozen=True)
class Measurement:
    """One (library, collective, kernel, type, mode, place, size). `library` is tricomm or what it is compared with.

    `nbytes` is the size as nccl-tests counts it. Times in microseconds, of the slowest rank: the median, the 99th per
    cent and the most of its calls; `skew_us` is the slowest rank's median less the fastest one's. `simulated` times
    come from Triton's interpreter on a CPU and say nothing about a GPU.
    """

    library: str
    collective: str
    algorithm: str
    protocol: str
    dtype: str
    op: str
    mode: str
    place: str
    nbytes: int
    p50_us: float
    p99_us: float
    max_us: float
    skew_us: float
    simulated: bool
    blocks: int = 0
    warps: int = 0
    tile: int = 0


@dataclass(frozen=True)
class Activity:
    """What a process (`job`) has done with one kernel and bucket of sizes: `tricomm.metrics.counters.Calls`, and whose.

    `route` is kernels, nccl or gloo; for the last two, which are a process's, `rank` is -1 and `group` empty.
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
class Entry:
    """A row of the history: what was measured, in which run."""

    run: Run
    measurement: Measurement


def default_path() -> Path:
    """`history.sqlite` in the XDG data directory."""
    return Path(platformdirs.user_data_dir("tricomm")) / "history.sqlite"


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
        """Write a row, for good before this returns; False where it cannot be, which is said once.

        Raises `InvalidArgument` for what is no measurement (a time that is no number).
        """
        if self._lost:
            return False
        try:
            with self._database:
                values = astuple(measurement)
                marks = ", ".join("?" * (len(values) + 1))
                self._database.execute("BEGIN IMMEDIATE")
                self._database.execute(f"INSERT INTO measurements VALUES ({marks})", (self._number(run), *values))
            return True
        except sqlite3.IntegrityError as error:
            raise InvalidArgument(f"history: {measurement} cannot be recorded: {error}") from None
        except sqlite3.Error as error:
            self._lost = True
            self._say(f"history {self.path}: {error}; going on without it")
            return False

    def _number(self, run: Run) -> int:
        facts = (*astuple(run)[:4], json.dumps(run.versions, sort_keys=True), run.commit)
        known = self._database.execute(f"SELECT id FROM runs WHERE {schema.SAME_RUN}", facts).fetchone()
        if known is None:
            known = (self._database.execute(schema.NEW_RUN, facts).lastrowid,)
        return int(known[0])

    def read(self, **equal: Any) -> list[Entry]:
        """Rows in the order in which they were written, those only whose columns equal what is given.

        Raises `InvalidArgument` for a column that is not there, `sqlite3.DatabaseError` for a file that broke after it
        was opened.
        """
        unknown = sorted(set(equal) - set(schema.COLUMN))
        if unknown:
            raise InvalidArgument(f"history: no column {', '.join(unknown)}; there is {', '.join(schema.COLUMN)}")
        where = " AND ".join(f"{schema.COLUMN[name]} = ?" for name in equal) or "1"
        query = f"{schema.ROWS} WHERE {where} {schema.ORDER}"
        runs: dict[int, Run] = {}
        return [_entry(row, runs) for row in self._database.execute(query, tuple(equal.values()))]

    def keep(self, rows: list[Activity]) -> bool:
        """Write what jobs have done, each row over what was known of it; False where it cannot be, which is said."""
        values = [tuple(min(v, _LARGEST) if isinstance(v, int) else v for v in astuple(row)) for row in rows]
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                marks = ", ".join("?" * len(fields(Activity)))
                self._database.executemany(f"INSERT OR REPLACE INTO activity VALUES ({marks})", values)
            return True
        except sqlite3.Error as error:
            self._say(f"history {self.path}: {error}; what jobs did is not in it")
            return False

    def activities(self) -> list[Activity]:
        """What jobs have done, oldest first."""
        rows = self._database.execute("SELECT * FROM activity ORDER BY date, rowid")
        found = (dict(zip((f.name for f in fields(Activity)), row, strict=True)) for row in rows)
        return [Activity(**{**row, "simulated": bool(row["simulated"])}) for row in found]

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM measurements").fetchone()[0])

    def close(self) -> None:
        """Idempotent."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _entry(row: tuple[Any, ...], runs: dict[int, Run]) -> Entry:
    number, date, device, topology, world_size, versions, commit, *measured, blocks, warps, tile = row
    if number not in runs:
        try:
            loaded = json.loads(versions)
        except ValueError:  # SQLite's pages have no checksum
            loaded = {"damaged": versions}
        runs[number] = Run(date, device, topology, world_size, loaded, commit)
    *others, simulated = measured
    values: tuple[Any, ...] = (*others, bool(simulated), blocks, warps, tile)
    return Entry(runs[number], Measurement(*values))


def to_json(entry: Entry) -> dict[str, Any]:
    """A flat record of a row."""
    return asdict(entry.run) | asdict(entry.measurement)


def open_history(path: Path | None = None, say: Say = lambda text: None) -> History | None:
    """The history in `path` [default: `default_path()`], made where there is none; None where there can be none.

    `say` is told, in words, where the file could not be used and what is used instead.
    """
    path = default_path() if path is None else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=_PATIENCE):
            return _opened(path, say)
    except (OSError, sqlite3.OperationalError) as error:  # filelock's timeout is an OSError
        say(f"history {path}: {error}; going on without it")
        return None


def _opened(path: Path, say: Say) -> History:
    try:
        return History(path, _ready(path), say)
    except schema.Newer as newer:
        beside = path.with_suffix(f".v{schema.VERSION}{path.suffix}")
        say(
            f"history {path} is of version {newer.version}, this tricomm knows {schema.VERSION}; it stays as it is, "
            f"rows go to {beside}"
        )
        return History(beside, _ready(beside), say)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not schema.broken(error):
            raise
        kept = _set_aside(path)
        say(f"history {path} cannot be read ({error}); it is kept as {kept}, a new one is begun")
        return History(path, _ready(path), say)


def _ready(path: Path) -> sqlite3.Connection:
    """A connection to a history of this version. Raises `sqlite3.DatabaseError` for what is none, or broken."""
    with _closed_on_error(sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None)) as database:
        database.text_factory = lambda raw: raw.decode(errors="replace")
        schema.check(database)
        # Readers do not wait for writers; a row is on the disk before `append` returns.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        schema.migrate(database)
        return database


@contextmanager
def _closed_on_error(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    try:
        yield database
    except BaseException:
        database.close()
        raise


def _set_aside(path: Path) -> Path:
    stamp = now().replace(":", "").replace("+0000", "")
    kept = path.with_name(f"{path.stem}.broken-{stamp}-{os.getpid()}{path.suffix}")
    for end in ("", "-wal", "-shm"):
        if Path(f"{path}{end}").exists():
            os.replace(f"{path}{end}", f"{kept}{end}")
    return kept
