"""Points that got slower since a date, points that cannot be judged, and comparisons of two runs."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.perf.dashboard import dashboard_data
from tricomm.cli import cli
from tricomm.perf.bench.request import Settings
from tricomm.perf.bench.session import Results
from tricomm.perf.bench_row import BenchRow
from tricomm.perf.dashboard import change_points, changes, collect
from tricomm.perf.history.database import Entry

pytestmark = pytest.mark.usefixtures("folders")


def _run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def _changes(path: Path, *words: object) -> Result:
    return _run("dashboard", "--changes", "--history", path, *words)


def _history(tmp_path: Path, rows: Sequence[Entry]) -> Path:
    return dashboard_data.written(tmp_path / "history.sqlite", rows)


def _slower(rows: Sequence[Entry], factor: float = 3.0) -> list[Entry]:
    return [replace(e, measurement=replace(e.measurement, p50_us=factor * e.measurement.p50_us)) for e in rows]


def _dated(rows: Sequence[Entry], last: datetime, apart: timedelta) -> list[Entry]:
    """`rows`, whose last run is of `last` and the others `apart`."""
    runs = list(dict.fromkeys(e.run.date for e in rows))
    dates = {d: (last - (len(runs) - 1 - n) * apart).isoformat(timespec="seconds") for n, d in enumerate(runs)}
    return [replace(e, run=replace(e.run, date=dates[e.run.date])) for e in rows]


def test_a_point_with_an_earlier_time_of_zero_is_listed_first() -> None:
    steps = [[[0, 2.0, 3.0]], [[0, 0.0, 3.0]]]
    line = {"kernel": "nccl", "size": [8, 16], "run": [[0], [0]], "changes": steps, "unproven": [[], []]}
    scene = dict.fromkeys(("collective", "dtype", "world_size", "mode", "place", "device"), "x")
    data = {"scenes": [scene | {"simulated": False, "lines": [line]}], "runs": [("2026-01-01", "abc")]}
    told = [str(change).split()[:4] for change in changes.judge(data).changes]
    assert told == [["+inf%", "0", "->", "3"], ["+50.0%", "2", "->", "3"]]


def test_a_regression_has_an_exit_code(tmp_path: Path) -> None:
    done = _changes(_history(tmp_path / "same", dashboard_data.entries(30)))
    assert (done.exit_code, done.output) == (0, "0 points are slower, 0 faster, of 20 in the latest runs\n")
    done = _changes(_history(tmp_path / "slower", dashboard_data.entries(30, step_at=15)))
    event, *lines, summary = done.output.splitlines()
    assert event == "2026-01-01T15:00:00+00:00, commits 000000e..000000f:"
    assert done.exit_code == 1 and summary.startswith("4 points are slower, 0 faster") and len(lines) == 4
    assert all("one_shot/simple" in line and "+" in line for line in lines)


def test_benchmarks_of_one_day_and_commit_are_one_event(tmp_path: Path) -> None:
    rows = dashboard_data.entries(30, step_at=15)
    later = [replace(e, measurement=replace(e.measurement, collective="all_gather")) for e in rows]
    later = [replace(e, run=replace(e.run, date=e.run.date.replace(":00:00+", ":30:00+"))) for e in later]
    told = _changes(_history(tmp_path, [*rows, *later])).output.splitlines()
    assert [line for line in told if ".." in line] == [told[0]] and "8 points are slower, 0 faster" in told[9]


@pytest.mark.parametrize("runs", [0, 1, 9, 13])
def test_too_few_runs_to_judge_are_no_all_clear(tmp_path: Path, runs: int) -> None:
    rows = dashboard_data.entries(runs + 1)[: 20 * runs]
    path = _history(tmp_path, [*rows[:-20], *_slower(rows[-20:])])
    done = _changes(path)
    assert done.exit_code == (5 if runs else 6) and "0 points are slower" in done.output
    assert not runs or "20 of 20 points of the latest runs have too few runs to judge: 14 are needed" in done.output
    assert ("took longer in the latest runs than in any before, up to +2" in done.output) is (runs > 5)
    judged = json.loads(_changes(path, "--json").stdout)
    assert judged["verdict"] == ("too few runs to judge" if runs else "no data")
    assert (judged["few"], judged["points"]) == (20 * (runs > 0),) * 2


@pytest.mark.parametrize("late", range(1, 9))
def test_no_moment_after_a_step_gives_an_all_clear(tmp_path: Path, late: int) -> None:
    rows = dashboard_data.entries(20)
    done = _changes(_history(tmp_path, [*rows[: -20 * late], *_slower(rows[-20 * late :])]))
    judged = json.loads(_changes(tmp_path / "history.sqlite", "--json").output)
    assert done.exit_code == (1 if judged["slower"] else 5)
    assert judged["slower"] + len(judged["unproven"]) >= 20


def test_without_the_check_of_the_latest_runs_a_step_would_be_an_all_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_points, "unproven", lambda values, found: None)
    rows = dashboard_data.entries(20)
    assert _changes(_history(tmp_path, [*rows[:-20], *_slower(rows[-20:])])).exit_code == 0


def test_one_odd_value_in_twenty_is_reported_without_an_alarm(tmp_path: Path) -> None:
    rows = dashboard_data.entries(20)
    done = _changes(_history(tmp_path, [*rows[:-1], *_slower(rows[-1:])]))
    assert done.exit_code == 0 and "1 of 20 points took longer" in done.output


def test_points_that_the_latest_run_has_not_measured_need_no_judgement(tmp_path: Path) -> None:
    once = dashboard_data.entries(1, sizes=(77,))
    assert _changes(_history(tmp_path, [*once, *dashboard_data.entries(20)])).exit_code == 0
    gone = [*dashboard_data.entries(8, sizes=(77,)), *_slower(dashboard_data.entries(9, sizes=(77,))[-5:])]
    assert _changes(_history(tmp_path / "gone", [*gone, *dashboard_data.entries(20)])).exit_code == 0
    both = [*dashboard_data.entries(30), *dashboard_data.entries(3, dtype="bfloat16")]
    assert collect.page_data(both)["unjudged"] == (20, 40)  # each chart has its own latest run


def test_one_command_lists_regressions_since_a_date(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    rows = _dated(dashboard_data.entries(30, step_at=20), now, timedelta(hours=1))
    path = _history(tmp_path, rows)
    for since, code, count in (("7d", 1, 4), ("11h", 1, 4), ("5h", 0, 0), ("2020-01-01", 1, 4)):
        done = _changes(path, "--since", since)
        assert done.exit_code == code and f"{count} points are slower since 20" in done.output, since
    assert _changes(path, "--since", f"{now.astimezone():%A}").exit_code in (0, 1)  # it may have begun after the step
    stale = _history(tmp_path / "stale", _dated(rows, now - timedelta(days=2), timedelta(hours=1)))
    done = _changes(stale, "--since", "1d")
    assert done.exit_code == 5 and "nothing was measured since then; the latest run is of" in done.output
    judged = json.loads(_changes(path, "--since", "7d", "--json").output)
    assert (judged["verdict"], judged["slower"], judged["faster"]) == ("slower", 4, 0)
    assert judged["changes"][0]["commits"] == "commits 0000013..0000014"
    assert judged["changes"][0]["point"]["kernel"] == "one_shot/simple"


@pytest.mark.parametrize("text", ["", "x", "7", "7y", "-7d", "99999d", "mon day", "2026-13-01", "0001-01-01"])
def test_an_invalid_date_is_refused(tmp_path: Path, text: str) -> None:
    done = _changes(_history(tmp_path, []), "--since", text)
    assert done.exit_code == 2 and "7d, 12h, a weekday or a date like 2026-01-31" in " ".join(done.output.split())
    assert _run("dashboard", "--html", "x", "--since", "7d").exit_code == 2


@pytest.mark.parametrize("text", ["2999-01-01", "9999-12-31", "2999-01-01T10:00+02:00"])
def test_a_date_in_the_future_is_refused(tmp_path: Path, text: str) -> None:
    path = _history(tmp_path, dashboard_data.entries(1))
    for words in (("dashboard", "--changes", "--since", text), ("compare", text)):
        done = _run(*words, "--history", path)
        assert done.exit_code == 2 and f"{text!r}: it is in the future" in " ".join(done.output.split())


@pytest.mark.parametrize("jump", [timedelta(days=9000), timedelta(days=-9000)])
def test_a_clock_that_jumped_hides_no_change(tmp_path: Path, jump: timedelta) -> None:
    rows = _dated(dashboard_data.entries(30, step_at=15), datetime.now(UTC), timedelta(hours=1))
    cut = rows[299].run.date
    moved = [
        replace(e, run=replace(e.run, date=(datetime.fromisoformat(e.run.date) + jump).isoformat()))
        if cut < e.run.date < rows[-100].run.date
        else e
        for e in rows
    ]
    done = _changes(_history(tmp_path, moved), "--since", "7d")
    assert done.exit_code == 1 and "4 points are slower" in done.output
    assert "The clock has jumped back (1x): runs are in the order in which they were written" in done.output
    assert "clock" not in _changes(_history(tmp_path / "right", rows)).output
    future = _dated(dashboard_data.entries(2), datetime(2999, 1, 1, tzinfo=UTC), timedelta(hours=1))
    assert "2999-01-01 00:00:00, in the future" in _changes(_history(tmp_path / "future", future)).output


def test_an_unreadable_history_has_its_exit_code(tmp_path: Path) -> None:
    path = _history(tmp_path, dashboard_data.entries(20))
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    done = _changes(path)
    assert done.exit_code == 6 and "is of version 99, this tricomm knows 3; it stays as it is" in done.output
    assert _run("compare", "--history", path).exit_code == 6
    path.write_bytes(path.read_bytes()[:100] + b"no database" * 100)
    done = _changes(path)
    assert done.exit_code == 6 and "cannot be read" in done.output
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".sqlite"] == [path.name]


def _json_file(path: Path, rows: Sequence[Entry]) -> Path:
    """The file of `tricomm bench --json` for the rows of one run."""
    run = rows[0].run
    header: dict[str, Any] = {"device": run.device, "topology": run.topology, "ranks": run.world_size, "versions": {}}
    results = Results(header | {"box": run.box}, [(BenchRow(e.measurement, 2, 8, 8),) for e in rows])
    path.write_text(json.dumps(results.to_json(Settings((), (8,), "sum", ("eager",)))))
    return path


def test_two_runs_are_compared_however_they_are_named(tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(hour=12)
    rows = _dated(dashboard_data.entries(4, step_at=3), now, timedelta(days=1))
    path = _history(tmp_path, rows)
    one, four = _json_file(tmp_path / "1.json", rows[:20]), _json_file(tmp_path / "4.json", rows[-20:])
    other = _history(tmp_path / "other", rows[-20:])
    for old, new in (
        *((1, 4), ("latest~3", "latest"), (f"{0:07x}", f"{3:07x}"), (one, four), (one, other), (2, "latest")),
        ((now - timedelta(days=3)).strftime("%Y-%m-%d"), "latest"),
        ("49h", 4),
    ):
        done = _run("compare", old, new, "--history", path)
        header, before, after, *points, summary = done.output.splitlines()
        assert header.split()[0] == "run" and f"old: {old} " in before and f"new: {new} " in after
        assert done.exit_code == 1 and len(points) == 4 and all("one_shot/simple" in point for point in points)
        assert summary == "4 points are slower, 0 faster, of 20 that both have measured"
        assert _run("compare", new, old, "--history", path).exit_code == 0
    assert _run("compare", 1, "--history", path, "--threshold", 20).exit_code == 0
    for number in ("nan", "inf", "-1"):  # no point is slower by more than such a number
        assert _run("compare", 1, "--history", path, "--threshold", number).exit_code == 2
    listed = _run("compare", "--history", path)
    assert listed.exit_code == 0 and [line.split()[0] for line in listed.output.splitlines()] == ["run", *"1234"]


def test_runs_of_a_commit_are_taken_together(tmp_path: Path) -> None:
    rows = [replace(e, run=replace(e.run, commit="abcdef12")) for e in dashboard_data.entries(3)]
    path = _history(tmp_path, [*rows, *_slower(dashboard_data.entries(4)[-20:], 1.2)])
    assert "20 points are slower" in _run("compare", "abcdef", "--history", path).output
    noisy = [*rows[:20], *_slower(rows[20:40]), *rows[40:]]
    path = _history(tmp_path / "noisy", [*noisy, *dashboard_data.entries(4)[-20:]])
    assert "0 points are slower" in _run("compare", "abcdef", "--history", path).output


def test_runs_that_cannot_be_compared_are_reported(tmp_path: Path) -> None:
    path = _history(tmp_path, [*dashboard_data.entries(1), *dashboard_data.entries(2, device="another")[-20:]])
    done = _run("compare", 1, 2, "--history", path)
    assert done.exit_code == 6 and "of 0 that both have measured" in done.output
    assert "NVIDIA H100" in done.output and "another" in done.output
    for text in ("3", "0", "latest~2", "abcdef0", "2026-02-30", "nonsense"):
        done = _run("compare", text, "--history", path)
        assert done.exit_code == 2 and text in done.output, text
    done = _run("compare", "1999-01-01", "--history", path)
    assert done.exit_code == 6 and "1999-01-01: the history begins later, at 20" in done.output
    broken = tmp_path / "broken.json"
    for content in ("", "[]", "{}", '{"header": {}, "results": []}', '{"header": 1, "results": [1]}'):
        broken.write_text(content)
        done = _run("compare", broken, "--history", path)
        assert done.exit_code == 2 and "is neither a history nor a file of" in " ".join(done.output.split()), content
    broken.write_text("mine")
    done = _run("compare", "--history", broken)
    assert done.exit_code == 2 and "no history of tricomm" in done.output and broken.read_text() == "mine"
    for words in (("compare",), ("compare", "monday"), ("compare", "latest"), ("dashboard", "--changes")):
        done = _run(*words)
        assert done.exit_code == 6 and "the history has no runs: `tricomm bench` adds one" in done.output


def test_comparing_does_not_change_the_history(tmp_path: Path) -> None:
    path, other = _history(tmp_path, dashboard_data.entries(1)), _history(tmp_path / "other", dashboard_data.entries(1))
    with closing(sqlite3.connect(other)) as database:
        database.execute("PRAGMA user_version = 99")
    for damage, said in (
        (None, "Error: history {} is of version 99,"),
        (b"no database" * 100, "Error: history {} cannot be read:"),
    ):
        if damage is not None:
            other.write_bytes(other.read_bytes()[:100] + damage)
        content = other.read_bytes()
        done = _run("compare", other, "--history", path)
        assert done.exit_code == 2 and said.format(other) in " ".join(done.output.split())
        assert other.read_bytes() == content and list(other.parent.glob("*.sqlite")) == [other]


def test_a_run_with_rows_of_another_library_is_simulated(tmp_path: Path) -> None:
    rows = dashboard_data.entries(1, simulated=True)
    native = replace(rows[-1], measurement=replace(rows[-1].measurement, library="gloo", simulated=False))
    listed = _run("compare", "--history", _history(tmp_path, [*rows, native]))
    assert listed.output.splitlines()[-1].endswith(" (simulated)")
