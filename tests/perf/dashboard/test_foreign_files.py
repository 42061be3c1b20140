"""Directories of statistics, tables and histories to which other users may write: planted files are not read."""

import json
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.perf.dashboard import dashboard_data
from tests.perf.dashboard.test_jobs import job_file
from tests.store.test_files import OTHER, as_root
from tricomm.cli import cli
from tricomm.errors import ResourceError
from tricomm.metrics import publish
from tricomm.perf.bench import outputs
from tricomm.perf.bench.request import Settings
from tricomm.perf.bench.session import Results
from tricomm.perf.dashboard import jobs
from tricomm.perf.dashboard.source import Source
from tricomm.perf.history.database import open_history
from tricomm.perf.tuner.sample_log import SampleLog
from tricomm.policy import user_tables
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of all files here; every user may write to it, as to /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    for name in ("TRICOMM_STATS_DIR", "TRICOMM_TUNING_DIR"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TRICOMM_STATS", "60")
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file that only this user may write to."""
    file = tmp_path / "own"
    file.write_text("secret")
    return file


def test_a_job_writes_over_no_file_that_a_link_points_to(shared: Path, own: Path) -> None:
    publisher = publish._Publisher(60)
    for suffix in (".part", ".json"):
        publisher.file.with_suffix(suffix).symlink_to(own)
    publisher.write()
    assert own.read_text() == "secret" and json.loads(publisher.file.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_job_writes_nothing_where_others_replace_files(shared: Path, mode: int, caplog) -> None:
    shared.chmod(mode)
    publisher = publish._Publisher(60)
    publisher.write()
    publisher.write()
    (warning,) = caplog.messages
    assert f"uid {os.geteuid()}, mode {mode:o}" in warning and list(shared.iterdir()) == []


def test_nothing_is_read_where_others_replace_files(shared: Path) -> None:
    file = job_file(shared, pid=1 << 22, started=7)
    shared.chmod(0o777)
    published = jobs.read()
    assert published.jobs == () and "can change what is in it" in published.notes[0]
    assert Source(None, print).data()["jobs"] == [] and file.exists()


@as_root
def test_another_users_job_is_neither_in_the_history_nor_deleted(shared: Path) -> None:
    file = job_file(shared, pid=1 << 22, started=7)
    os.chown(file, OTHER, OTHER)
    said: list[str] = []
    assert Source(None, said.append).data()["jobs"] == [] and file.exists()
    with open_history() as history:  # type: ignore[union-attr]
        assert history.activities() == []
    assert any("belongs to another user" in text for text in said)


def test_a_fifo_does_not_block_a_reader(shared: Path) -> None:
    os.mkfifo(shared / "1-1.json")
    job_file(shared)
    assert len(jobs.read().jobs) == 1
    source = Source(None, lambda text: None)
    assert source.packed() and source.metrics()
    done = CliRunner().invoke(cli, ["dashboard", "--prometheus"])
    assert done.exit_code == 0 and "1-1.json is ignored: it is no regular file" in done.output
    done = CliRunner().invoke(cli, ["doctor"])
    assert "1-1.json: it is no regular file" in " ".join(done.output.split())
    assert CliRunner().invoke(cli, ["tune", "show"]).exit_code == 1


def test_a_file_that_blocks_uses_one_thread_and_other_clients_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    go, source = threading.Event(), Source(None, print)
    real, seen = jobs.read, []

    def slow() -> jobs.PublishedJobs:
        seen.append(threading.current_thread())
        assert go.wait(60)
        return real()

    known = source.packed()
    monkeypatch.setattr(jobs, "read", slow)
    monkeypatch.setattr("tricomm.perf.dashboard.source._PATIENCE", 0.2)
    first = threading.Thread(target=source.packed)
    first.start()
    while not seen:
        pass
    for _ in range(3):
        assert source.packed() == known
        with pytest.raises(ResourceError, match="a file of .* does not answer"):
            source.metrics()
    go.set()
    first.join()
    assert set(seen) == {first} and source.metrics()


ROW = TableRow("all_reduce", 2, 1024, "two_shot", "simple")
BOX = Fingerprint("cpu", "", 2)


def test_a_table_that_another_could_have_placed_is_not_used(shared: Path, own: Path, caplog) -> None:
    own.write_bytes(user_tables.tuning_tables.dumps(TunedTable(BOX, (ROW,))))
    file = user_tables.path(BOX)
    for plant in (os.mkfifo, lambda place: place.symlink_to(own)):
        plant(file)
        assert user_tables.load(BOX) is None
        file.unlink()
    assert "it is no regular file" in caplog.text and "it is a symbolic link" in caplog.text
    user_tables.save(TunedTable(BOX, (ROW,)))
    assert user_tables.load(BOX).rows == (ROW,)  # type: ignore[union-attr]
    shared.chmod(0o777)
    assert user_tables.load(BOX) is None and "can change what is in it" in caplog.messages[-1]
    with pytest.raises(ResourceError, match="can change what is in it"):
        user_tables.save(TunedTable(BOX, (ROW,)))


@as_root
def test_a_table_of_root_is_used_by_all_and_one_of_another_user_by_none(shared: Path, monkeypatch) -> None:
    file = user_tables.save(TunedTable(BOX, (ROW,)))
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert user_tables.load(BOX).rows == (ROW,)  # type: ignore[union-attr]
    os.chown(file, OTHER + 1, OTHER)
    assert user_tables.load(BOX) is None
    assert user_tables.read(file, named=True).rows == (ROW,)


def test_a_tables_lock_and_a_tuning_record_are_no_links(shared: Path, own: Path) -> None:
    Path(f"{user_tables.path(BOX)}.lock").symlink_to(own)
    with pytest.raises(ResourceError, match="it is a symbolic link"):
        user_tables.save(TunedTable(BOX, (ROW,)))
    record = shared / "tuning-1.jsonl"
    for file in (record, record.with_name(f"{record.name}.{os.getpid()}.part")):
        file.symlink_to(own)
    SampleLog(record, "key").close(finished=False)
    assert own.read_text() == "secret" and record.read_bytes() == b"key\n" and not record.is_symlink()


@pytest.mark.parametrize("end", ["", "-wal", "-shm", ".lock"])
def test_a_history_is_no_link(end: str, tmp_path: Path, own: Path) -> None:
    path = tmp_path / "history.sqlite"
    if end:
        dashboard_data.written(path, dashboard_data.entries(1)[:1])
    own.write_bytes(b"")
    for file in tmp_path.glob(f"{path.name}{end}"):
        file.unlink()
    Path(f"{path}{end}").symlink_to(own)
    said: list[str] = []
    assert open_history(path, said.append) is None and "it is a symbolic link" in said[0]
    assert own.read_bytes() == b""


@as_root
def test_rows_that_another_user_has_planted_in_the_log_of_a_history_are_not_taken(tmp_path: Path) -> None:
    path = dashboard_data.written(tmp_path / "history.sqlite", dashboard_data.entries(1)[:1])
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM measurements")
        database.commit()
        os.chown(f"{path}-wal", OTHER, OTHER)
        said: list[str] = []
        assert open_history(path, said.append) is None and "belongs to another user" in said[0]


def test_the_default_history_is_not_where_others_replace_files(tmp_path: Path) -> None:
    (tmp_path / "data" / "tricomm").mkdir(parents=True)
    (tmp_path / "data" / "tricomm").chmod(0o777)
    said: list[str] = []
    assert open_history(say=said.append) is None and "can change what is in it" in said[0]


def test_a_benchmarks_json_follows_no_link_that_could_be_guessed(shared: Path, own: Path) -> None:
    file = shared / "rows.json"
    file.with_name("rows.json.part").symlink_to(own)
    settings = Settings((), (8,), "sum", ("eager",))
    with outputs.Files(settings, Results(), file, None, None):
        pass
    assert own.read_text() == "secret" and json.loads(file.read_text())["results"] == []
