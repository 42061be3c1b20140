"""The command that prints the bars: bars that pass, columns of other checkouts, refusals. The numbers are fakes."""

import json
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from devtools import bars, c10d_overhead, earlier_numbers
from devtools.bars import Bar
from devtools.kept_rows import KeptRows
from tricomm.errors import InvalidArgument
from tricomm.perf import provenance

_KEPT = Path(bars.__file__).parent.parent / "devtools" / "notes" / "performance.json"


def _numbers(**values: Any) -> dict[str, Any]:
    origin = {"commit": "0123456789ab", "date": "2026-11-22 13:00 UTC", "versions": {"triton": "3.9.0"}}
    return {"schema": 1, **origin, "values": values}


@pytest.mark.parametrize(
    ("bar", "before", "now", "verdict"),
    [
        (Bar("a", "us", most=2), None, 2, "yes"),
        (Bar("a", "us", most=2), 1, 2.1, "no"),
        (Bar("a", "", least=0.8), None, 0.79, "no"),
        (Bar("a", "", 1, 1), None, 1.0, "yes"),
        (Bar("a", "us", most=9, ratio=0.6), 10, 6, "yes"),
        (Bar("a", "us", most=9, ratio=0.6), 10, 6.1, "no"),
        (Bar("a", "us", ratio=0.6), None, 6, ""),
        (Bar("a", "us", ratio=0.6), "not available: no compiler", 6, ""),
        (Bar("a", "us", most=2), 1, "not available: no compiler", ""),
        (Bar("a", ""), 1, 2, ""),
    ],
)
def test_a_bar_is_met_missed_or_not_judged(bar: Bar, before: Any, now: Any, verdict: str) -> None:
    assert bar.verdict(before, now) == verdict


def test_every_kept_number_has_a_bar_and_the_table_has_all() -> None:
    kept = json.loads(_KEPT.read_text())
    names = [bar.name for bar in bars.bars()]
    graphs = [bar.name for bar in bars.bars(graphs=True)]
    repeated = [name for name, _, _ in bars.HOST if "in place" in name]
    assert len(graphs) == 11 and names[:11] == graphs and len(repeated) == 4
    # These are compared with the commit before, not with the kept numbers.
    assert len(set(names)) == len(names) and set(names) - {*graphs, *repeated} <= kept["values"].keys()
    assert not any(isinstance(value, str) and "not available" in value for value in kept["values"].values())
    lines = bars.lines(kept, kept)
    assert len(lines) == 4 + len(names) and "not measured" in lines[0]
    assert kept["commit"] in lines[1] and kept["date"] in lines[1] and kept["versions"]["triton"] in lines[1]


def test_another_checkout_runs_its_own_command(tmp_path: Path) -> None:
    folder = tmp_path / "devtools"
    folder.mkdir()
    text = json.dumps(_numbers(a=1.5))
    checked = f"import os\nassert os.environ['PYTHONPATH'] == {str(tmp_path)!r}\n"
    (folder / "bars.py").write_text(checked + f"print({text!r})\n")
    assert earlier_numbers.find(tmp_path)["values"] == {"a": 1.5}
    (folder / "bars.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(InvalidArgument, match=r"its devtools.bars ended with 3"):
        earlier_numbers.find(tmp_path)
    with pytest.raises(InvalidArgument, match="of before devtools/graph_bars.py; compare with it without --graphs"):
        earlier_numbers.find(tmp_path, graphs=True)


def test_every_host_time_is_one_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars.c10d_overhead, "measure", partial(c10d_overhead.measure, rounds=3))
    row = next(get() for name, get in bars._units() if name == bars.HOST[0][0])
    assert list(row["values"]) == [name for name, _, _ in bars.HOST]
    assert all(isinstance(value, float) and value > 0 for value in row["values"].values()), row


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Commits a `devtools.bars` of these lines to the repository in which `earlier_numbers` looks; git's command."""

    def made(lines: str) -> list[str]:
        monkeypatch.setattr(earlier_numbers, "_HERE", tmp_path)
        (tmp_path / "devtools").mkdir()
        (tmp_path / "devtools" / "bars.py").write_text(lines)
        (tmp_path / "devtools" / "graph_bars.py").touch()
        git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "One"]):
            subprocess.run([*git, *command], check=True)
        return git

    return made


def _worktrees(git: list[str]) -> int:
    kept = subprocess.run([*git, "worktree", "list"], check=True, text=True, capture_output=True).stdout
    return len(kept.splitlines())


def test_a_commit_runs_its_own_command_in_a_worktree_that_is_removed(commit: Callable[[str], list[str]]) -> None:
    git = commit(f"import sys\nprint({json.dumps(_numbers(a=1.5))!r} if '--graphs' in sys.argv else '')\n")
    assert earlier_numbers.find(Path("HEAD"), graphs=True)["values"] == {"a": 1.5}
    assert _worktrees(git) == 1
    with pytest.raises(InvalidArgument, match="HEAD~7 is no file, no checkout and no commit"):
        earlier_numbers.find(Path("HEAD~7"))


def test_a_terminated_comparison_removes_its_worktree(commit: Callable[[str], list[str]]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    git = commit("import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)\n")
    with pytest.raises(SystemExit) as ended:
        earlier_numbers.find(Path("HEAD"))
    assert ended.value.code == 128 + signal.SIGTERM and _worktrees(git) == 1
    assert signal.getsignal(signal.SIGTERM) is handler


def test_an_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows"
    monkeypatch.setattr(provenance, "commit", lambda: "0123456789ab")
    kept = KeptRows(file)
    assert kept.get("a", lambda: {"n": 1}) == {"n": 1} and kept.get("b", lambda: {"n": "not available: busy"})
    file.write_text(file.read_text() + '["c", {"n"')  # the run was interrupted here
    kept = KeptRows(file)
    assert kept.get("a", lambda: {"n": 2}) == {"n": 1}
    assert [kept.get(name, lambda: {"n": 3}) for name in "bc"] == [{"n": 3}] * 2
    assert KeptRows(file).get("c", lambda: {"n": 4}) == {"n": 3}
    for commit in ("0123456789ac", "0123456789ab+", ""):
        monkeypatch.setattr(provenance, "commit", lambda commit=commit: commit)
        done = CliRunner().invoke(bars.main, ["--kept", str(file)])
        assert done.exit_code == 2 and ("rows of" in done.output if commit.isalnum() else "has changes" in done.output)


def test_a_record_without_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="neither a file of numbers nor a checkout with devtools/bars.py"):
        earlier_numbers.find(tmp_path)
    file = tmp_path / "numbers.json"
    for text in ("", "[]", '{"schema": 2, "values": {}}', '{"schema": 1}', '{"schema": 1, "values": 5}'):
        file.write_text(text)
        with pytest.raises(InvalidArgument, match="no numbers of"):
            earlier_numbers.find(file)
    done = CliRunner().invoke(bars.main, ["--against", str(file)])
    assert done.exit_code == 2 and "no numbers of" in done.output


def test_the_command_prints_a_table_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bars, "measure", lambda progress, kept, graphs: _numbers(**{"host time over `fake`: direct": 0.5})
    )
    printed = CliRunner().invoke(bars.main, [])
    assert printed.exit_code == 0 and "host time over `fake`: direct" in printed.output
    assert json.loads(CliRunner().invoke(bars.main, ["--json"]).output)["values"]
