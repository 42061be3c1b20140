"""The history keeps its rows when processes are killed, files are damaged, or several processes share it."""

import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tricomm.errors import InvalidArgument
from tricomm.perf.bench_row import Measurement
from tricomm.perf.history import database, schema
from tricomm.perf.history.database import open_history
from tricomm.perf.history.schema import Run

_RUN = Run("2026-11-21T12:00:00+00:00", "a box", "nvswitch", 8, {"tricomm": "0.1.0"}, "abc")
_ROW = Measurement(
    "tricomm", "all_reduce", "one_shot", "ll", "float32", "sum", "eager", "in_place", 1024, 5.0, 6.0, 7.0, 0.5, True
)

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_time = st.floats(0, 1e15)
_count = st.integers(0, (1 << 63) - 1)
_runs = st.builds(Run, _text, _text, _text, _count, st.dictionaries(_text, _text, max_size=3), _text)
_rows = st.builds(Measurement, *[_text] * 8, _count, *[_time] * 4, st.booleans(), *[_count] * 3)


class Said(list[str]):
    __call__ = list.append


@pytest.fixture
def said() -> Said:
    return Said()


def _opened(path: Path, said: Said) -> database.History:
    history = open_history(path, said)
    assert history is not None, said
    return history


@given(st.lists(st.tuples(_runs, _rows), max_size=6))
@settings(deadline=None, max_examples=40)
def test_written_values_are_read_unchanged(rows: list[tuple[Run, Measurement]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deep" / "history.sqlite"
        with _opened(path, Said()) as first:
            assert all(first.append(*row) for row in rows)
        with _opened(path, Said()) as again:
            assert [(e.run, e.measurement) for e in again.read()] == rows and len(again) == len(rows)


def test_rows_of_one_run_share_it(tmp_path: Path, said: Said) -> None:
    with _opened(tmp_path / "h.sqlite", said) as history:
        for nbytes in (1, 2, 3):
            history.append(_RUN, replace(_ROW, nbytes=nbytes, simulated=nbytes != 2))
        history.append(replace(_RUN, commit="def"), _ROW)
        assert [e.measurement.simulated for e in history.read()] == [True, False, True, _ROW.simulated]
        assert sqlite3.connect(history.path).execute("SELECT count(*) FROM runs").fetchone() == (2,)


def test_a_time_that_is_no_number_is_refused_and_the_next_row_goes_in(tmp_path: Path, said: Said) -> None:
    with _opened(tmp_path / "h.sqlite", said) as history:
        with pytest.raises(InvalidArgument, match="cannot be recorded"):
            history.append(_RUN, replace(_ROW, p50_us=float("nan")))
        assert history.append(_RUN, _ROW) and len(history) == 1 and not said


_WRITER = """
import sys
from pathlib import Path
from contextlib import closing
from dataclasses import replace
from tests.perf.history.test_history import _ROW, _RUN
from tricomm.perf.history.database import open_history
history = open_history(Path(sys.argv[1]), print)
for number in range(int(sys.argv[2])):
    assert history.append(_RUN, replace(_ROW, library=sys.argv[3], nbytes=number))
    print(number, flush=True)
"""


def _writer(path: Path, rows: int, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, str(path), str(rows), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_loses_no_row_that_it_wrote(tmp_path: Path, said: Said) -> None:
    path = tmp_path / "h.sqlite"
    with _writer(path, 1_000_000, "victim") as victim:
        assert victim.stdout is not None
        for _ in range(50):
            last = int(victim.stdout.readline())
        victim.send_signal(signal.SIGKILL)
        last = max([last, *map(int, victim.stdout.read().split())])
    with _opened(path, said) as history:
        numbers = [e.measurement.nbytes for e in history.read()]
    assert numbers == list(range(len(numbers))) and len(numbers) in (last + 1, last + 2) and not said


def test_two_processes_write_at_once(tmp_path: Path, said: Said) -> None:
    path = tmp_path / "h.sqlite"
    writers = [_writer(path, 60, name) for name in ("one", "two")]
    assert [w.communicate(timeout=60)[0].split() for w in writers] == [[str(n) for n in range(60)]] * 2
    with _opened(path, said) as history:
        for name in ("one", "two"):
            mine = [e.measurement.nbytes for e in history.read() if e.measurement.library == name]
            assert mine == list(range(60))


def test_a_writer_waits_for_the_row_of_another_writer(tmp_path: Path, said: Said) -> None:
    with _opened(tmp_path / "h.sqlite", said) as history:
        other = sqlite3.connect(history.path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        later = threading.Timer(0.3, other.execute, ["ROLLBACK"])
        later.start()
        assert history.append(_RUN, _ROW) and not said
        later.join()
        other.close()


_FIRST_FILES = """
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
    CREATE TABLE activity (
        job TEXT NOT NULL, date TEXT NOT NULL, device TEXT NOT NULL, "group" TEXT NOT NULL, rank INTEGER NOT NULL,
        world_size INTEGER NOT NULL, simulated INTEGER NOT NULL, route TEXT NOT NULL, collective TEXT NOT NULL,
        algorithm TEXT NOT NULL, protocol TEXT NOT NULL, bucket INTEGER NOT NULL, calls INTEGER NOT NULL,
        nbytes INTEGER NOT NULL, timed INTEGER NOT NULL, seconds REAL NOT NULL, p50_us REAL, p99_us REAL,
        PRIMARY KEY (job, "group", rank, route, collective, algorithm, protocol, bucket)
    ) STRICT;
    PRAGMA application_id = 0x7472636D;
    PRAGMA user_version = 2;
    INSERT INTO runs VALUES (1, 'd', 'a box', 'nvswitch', 8, '{"tricomm": "0.1.0"}', 'abc');
    INSERT INTO measurements VALUES (1, 'tricomm', 'all_reduce', 'one_shot', 'll', 'float32', 'sum', 'eager',
                                     'in_place', 1024, 5.0, 6.0, 7.0, 0.5, 1, 4, 8, 512);
"""


def _layout(path: Path) -> list[object]:
    with closing(sqlite3.connect(path)) as file:
        return [file.execute(f"PRAGMA table_info({t})").fetchall() for t in ("runs", "measurements", "activity")]


def test_the_first_files_are_read_and_new_ones_have_their_layout(tmp_path: Path, said: Said) -> None:
    old, new = tmp_path / "old.sqlite", tmp_path / "new.sqlite"
    with closing(sqlite3.connect(old)) as file:
        file.executescript(_FIRST_FILES)
    row = replace(_ROW, blocks=4, warps=8, tile=512)
    with _opened(old, said) as history:
        assert [(e.run, e.measurement) for e in history.read()] == [(replace(_RUN, date="d"), row)]
        assert history.append(_RUN, row) and len(history) == 2
    _opened(new, said).close()
    assert _layout(new) == _layout(old) and not said


@pytest.mark.parametrize(
    "column", ["p50_us = NULL", "p99_us = 9e999", "skew_us = 'x'", "nbytes = NULL", "nbytes = -1", "simulated = NULL"]
)
def test_rows_that_are_no_measurements_are_left_out_and_counted(column: str, tmp_path: Path, said: Said) -> None:
    path = tmp_path / "h.sqlite"
    with closing(sqlite3.connect(path)) as file:  # another program's tables take any value
        file.executescript(_FIRST_FILES.replace(" STRICT", "").replace(" NOT NULL", ""))
        file.execute("INSERT INTO measurements SELECT * FROM measurements")
        file.execute(f"UPDATE measurements SET {column} WHERE rowid = 1")
        file.execute("INSERT INTO runs (id) VALUES (2)")
        file.execute("INSERT INTO measurements SELECT 2" + ", NULL" * 17)
        file.commit()
    with _opened(path, said) as history:
        kept = 2 if column.startswith("simulated") else 1  # a flag that is not set is false
        assert [e.measurement.p50_us for e in history.read()] == [5.0] * kept
    assert said == [f"history {path}: {3 - kept} rows are no measurements and are left out"]


# Files that cannot be used


def _damaged(whole: bytes, where: list[tuple[float, int]], length: float) -> bytes:
    data = bytearray(whole[: int(len(whole) * length)])
    for place, value in where:
        if data:
            data[int(place * (len(data) - 1))] = value
    return bytes(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "h.sqlite"
    with _opened(path, Said()) as history:
        for nbytes in range(40):
            history.append(_RUN, replace(_ROW, nbytes=nbytes))
    return path.read_bytes()


@given(
    where=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=40),
    length=st.one_of(st.just(1.0), st.floats(0, 1)),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_read_or_kept_and_rows_go_in(
    whole: bytes, where: list[tuple[float, int]], length: float
) -> None:
    damaged, said = _damaged(whole, where, length), Said()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "h.sqlite"
        path.write_bytes(damaged)
        with _opened(path, said) as history:
            before = len(history.read())
            assert history.append(_RUN, _ROW) and len(history.read()) == before + 1
        kept = list(Path(folder).glob("h.broken-*.sqlite"))
        assert len(kept) == len([text for text in said if "is kept as" in text]) <= 1
        assert all(k.read_bytes() == damaged and str(k) in said[0] for k in kept)


def test_without_the_check_damage_would_surface_later(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _opened(tmp_path / "h.sqlite", said) as history:
        for _ in range(200):
            history.append(_RUN, _ROW)
    damaged = bytearray((tmp_path / "h.sqlite").read_bytes())
    damaged[-4096:] = b"\x77" * 4096
    (tmp_path / "h.sqlite").write_bytes(damaged)
    with monkeypatch.context() as patched, pytest.raises(sqlite3.DatabaseError):
        patched.setattr(schema, "check", lambda database: None)
        _opened(tmp_path / "h.sqlite", said).read()
    with _opened(tmp_path / "h.sqlite", said) as history:
        assert history.read() == [] and "is kept as" in said[-1]


def test_another_programs_database_is_not_written_to(tmp_path: Path, said: Said) -> None:
    other = sqlite3.connect(tmp_path / "h.sqlite")
    other.execute("CREATE TABLE theirs (x)")
    other.commit()
    other.close()
    with _opened(tmp_path / "h.sqlite", said) as history:
        assert history.append(_RUN, _ROW) and "another program's database" in said[0]


def test_a_newer_file_is_unchanged_and_rows_are_written_to_another_file(tmp_path: Path, said: Said) -> None:
    path = tmp_path / "h.sqlite"
    with _opened(path, said) as history:
        history.append(_RUN, _ROW)
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    newer.close()
    before = path.read_bytes()
    for rows in (1, 2):  # the other file is found again
        with _opened(path, said) as history:
            assert history.append(_RUN, _ROW) and len(history) == rows
            assert history.path.name == f"h.v{schema.VERSION}.sqlite" and str(history.path) in said[-1]
    assert path.read_bytes() == before


def test_an_older_file_is_migrated(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    with _opened(tmp_path / "h.sqlite", said) as history:
        history.append(_RUN, _ROW)
    step = "ALTER TABLE runs ADD COLUMN place TEXT NOT NULL DEFAULT 'here';"
    monkeypatch.setattr(schema, "_STEPS", (*schema._STEPS, step))
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    for _ in range(2):
        with _opened(tmp_path / "h.sqlite", said) as history:
            assert history.read()[0].measurement == _ROW
            assert history._database.execute("SELECT place FROM runs").fetchall() == [("here",)]
    assert not said


def test_a_directory_that_cannot_be_written_is_named_and_not_used(tmp_path: Path, said: Said) -> None:
    (tmp_path / "file").write_text("")
    assert open_history(tmp_path / "file" / "h.sqlite", said) is None
    assert open_history(Path("/proc/tricomm/h.sqlite"), said) is None
    assert len(said) == 2 and all("going on without it" in text for text in said)


def test_a_file_that_may_only_be_read_is_named_once(tmp_path: Path, said: Said) -> None:
    with _opened(tmp_path / "h.sqlite", said) as history:
        history._database.execute("PRAGMA query_only = 1")
        assert [history.append(_RUN, _ROW) for _ in range(3)] == [False] * 3
    assert len(said) == 1 and "readonly database; going on without it" in said[0]


def test_the_file_is_in_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert database.default_path() == tmp_path / "tricomm" / "history.sqlite"
