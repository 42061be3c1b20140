"""`--budget`: a check ends in time, also in the middle of a schedule, and the next one continues."""

import json
import signal
import stat
import time

import click
import pytest
import torch
from click.testing import CliRunner

import tricomm
from tests.commands.test_check_command import _passed
from tests.explorer.test_check import two_writers, words
from tests.explorer.test_reports import USERS_FILE
from tricomm.cli import cli
from tricomm.errors import InvalidArgument
from tricomm.explorer import campaign, selftest, subjects
from tricomm.explorer.report.report import Report
from tricomm.explorer.schedule import host_watchdog

ENDLESS = """
import time

import torch
import triton
import triton.language as tl


@triton.jit
def counts(words):
    while tl.load(words + 1) == 0:
        tl.store(words, tl.load(words) + 1)


def kernel(comm):
    memory = comm.symmetric((2,), torch.int64)
    memory.local.zero_()
    comm.launch(counts, 1, memory.local)


def spins(comm):
    while True:
        pass


def sleeps(comm):
    time.sleep(1000)


def swallows(comm):
    for _ in range(3):
        try:
            time.sleep(1000)
        except BaseException:
            pass
    time.sleep(1000)


def program():
    while True:
        pass
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tricomm" / "checks"


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USERS_FILE)
    return path


def check(*arguments, code=0):
    done = CliRunner().invoke(cli, ["check", *map(str, arguments), "--world-size", "2"])
    assert done.exit_code == code, done.output
    return done


def right(mine, schedules, *more, budget="100s", code=0):
    return check(f"{mine}:right", "--budget", budget, "--schedules", schedules, *more, code=code)


@pytest.mark.parametrize("name", ["kernel", "spins", "sleeps", "swallows", "program"])
def test_a_schedule_that_never_ends_is_cut(tmp_path, monkeypatch, name):
    monkeypatch.setattr(host_watchdog, "_AGAIN", 0.1)
    selftest.require("sm_90")  # before the budget
    (tmp_path / "endless.py").write_text(ENDLESS)
    began = time.monotonic()
    done = check(f"{tmp_path / 'endless.py'}:{name}", "--budget", "3s", code=2)
    assert time.monotonic() - began < 60
    assert "no schedule has ended: the budget ended in schedule 0, after " in done.output
    assert f"{tmp_path / 'endless.py'}:" in done.output.replace("\n", "")
    assert not torch.overrides._get_current_function_mode_stack(), "a mode of torch is left"
    assert tricomm.check(lambda comm: comm.barrier(), 2, schedules=2).ok


def test_an_import_that_never_ends_is_cut(tmp_path):
    (tmp_path / "endless.py").write_text("while True:\n    pass\n")
    done = check(f"{tmp_path / 'endless.py'}:program", "--budget", "1s", code=2)
    assert "endless.py: the budget has ended while it was imported" in done.output.replace("\n", " ")


def test_without_the_watchdog_a_schedule_is_not_cut(monkeypatch):
    monkeypatch.setattr(host_watchdog.signal, "pthread_kill", lambda thread, number: None)

    def sleeps(comm):
        time.sleep(2)

    began = time.monotonic()
    report = tricomm.check(sleeps, 1, schedules=1, budget=0.5)
    assert time.monotonic() - began >= 2 and not report.ended


def test_as_many_schedules_as_fit_are_run_and_a_cut_one_does_not_count():
    report = tricomm.check(lambda comm: comm.barrier(), 2, schedules=None, budget=2.0)
    assert report.ok and report.ran and not report.complete and "the budget ended in schedule" in report.ended
    for budget in (0, -1, True, "2m", float("nan")):
        with pytest.raises(InvalidArgument, match="budget="):
            tricomm.check(lambda comm: comm.barrier(), 2, budget=budget)
    with pytest.raises(InvalidArgument, match="random never ends"):
        tricomm.check(lambda comm: comm.barrier(), 2, schedules=None)


def test_a_finding_stays_if_there_is_no_time_to_shrink_it(monkeypatch):
    def late(again, finding, execution, most):
        raise host_watchdog.OutOfTime("after 3 steps")

    monkeypatch.setattr(campaign.shrinking, "shrink", late)
    report = tricomm.check(two_writers, 2, schedules=3, budget=100.0)
    assert [f.kind for f in report.findings] == ["race"] and report.findings[0].events and report.ended


def test_a_second_run_continues(mine):
    assert "no finding in 3 schedules" in right(mine, 3).output
    once = tricomm.check(subjects.from_file(f"{mine}:right"), 2, schedules=5)
    output = right(mine, 5).output
    assert f"no finding in 5 schedules (random), {once.steps} steps" in output and "3 of them in earlier runs" in output
    assert "5 of them in earlier runs" in right(mine, 5).output
    assert "earlier" not in right(mine, 5, "--again").output
    assert "earlier" not in right(mine, 5, "--seed", 1).output
    assert "earlier" not in check(f"{mine}:right", "--schedules", 5).output


INTERRUPTED = """
import os
import signal
from pathlib import Path

CALLS = []


def program(comm):
    CALLS.append(comm.rank)
    if len(CALLS) == 8 and Path(__file__).with_name("stop").exists():  # in the fourth schedule
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            if RAISED:
                raise
    comm.barrier()
"""


@pytest.mark.parametrize("raised", [True, False])
def test_an_interrupt_keeps_the_schedules_that_have_ended(tmp_path, raised):
    (tmp_path / "mine.py").write_text(INTERRUPTED.replace("RAISED", str(raised)))
    (tmp_path / "stop").touch()
    asked = f"{tmp_path / 'mine.py'}:program", "--schedules", 6, "--budget", "100s"
    done = CliRunner().invoke(cli, ["check", *map(str, asked), "--world-size", "2"], standalone_mode=False)
    assert isinstance(done.exception, click.Abort) and "3 schedules (random)" in done.output, done.output
    assert "; interrupted in schedule 3" in done.output
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (tmp_path / "stop").unlink()
    assert "no finding in 6 schedules" in (output := check(*asked).output) and ", 3 of them in earlier runs" in output


def test_a_changed_source_discards_earlier_runs(mine, tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 1\n")
    mine.write_text("import helper_of_mine\n" + USERS_FILE)
    right(mine, 2)
    assert "2 of them in earlier runs" in right(mine, 2).output
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 2\n")
    assert "earlier" not in right(mine, 2).output
    mine.write_text(mine.read_text() + "\n")
    assert "earlier" not in right(mine, 2).output


def test_a_changed_variable_that_a_source_names_discards_earlier_runs(mine, monkeypatch):
    mine.write_text('import os\nSIZE = os.environ.get("SIZE_OF_MINE")\n' + USERS_FILE)
    right(mine, 2)
    monkeypatch.setenv("_".join(["NOT", "OF", "MINE"]), "3")  # this file is a source, too
    assert "2 of them in earlier runs" in right(mine, 2).output
    monkeypatch.setenv("SIZE_OF_MINE", "3")
    assert "earlier" not in right(mine, 2).output


def test_a_kept_finding_is_run_again(mine, cache):
    racy = (f"{mine}:racy", "--budget", "100s", "--schedules", 4)
    first = check(*racy, code=1).output
    again = check(*racy, "--report", mine.with_suffix(".json"), "--timeline", mine.with_suffix(".svg"), code=1).output
    assert "of them in earlier runs" in again and first.splitlines()[1] == again.splitlines()[1]
    assert Report.load(mine.with_suffix(".json")).findings[0].kind == "race"
    (kept,) = cache.iterdir()
    values = json.loads(kept.read_text())
    values["findings"][0]["where"] = ["elsewhere.py:1", "elsewhere.py:2"]
    kept.write_text(json.dumps(values))
    assert "elsewhere" not in check(*racy, code=1).output, "a kept finding was used without a run"


@pytest.mark.parametrize("text", ["", "{}", "[]", "[" * 10_000, "\0", '{"sources": 3}', '{"sources": {"x": 1}}'])
def test_a_broken_file_is_one_warning(mine, cache, text):
    right(mine, 2)
    (kept,) = cache.iterdir()
    kept.write_text(text)
    done = right(mine, 2)
    assert "earlier runs" not in done.stdout
    assert done.stderr.count("earlier schedules are not used") == (text != '{"sources": {"x": 1}}')
    assert "2 of them in earlier runs" in right(mine, 2).output, "the broken file was not replaced"


def test_a_folder_that_cannot_be_written_is_one_warning(mine, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    done = right(mine, 2)
    assert done.stderr.count("the next run begins anew") == 1 and "no finding in 2 schedules" in done.stdout


def test_files_that_others_can_write_are_not_used(mine, cache):
    right(mine, 2)
    (kept,) = cache.iterdir()
    kept.chmod(kept.stat().st_mode | stat.S_IWOTH)
    assert "other users can write it" in right(mine, 2).stderr


def test_a_report_of_another_campaign_is_refused():
    since = tricomm.check(two_writers, 2, schedules=1)
    for more in ({"seed": 1}, {"strategy": "exhaustive"}, {"faults": ()}):
        with pytest.raises(InvalidArgument, match="since: "):
            tricomm.check(two_writers, 2, schedules=2, since=since, **more)
    with pytest.raises(InvalidArgument, match="another subject"):
        tricomm.check(lambda comm: words(comm), 2, schedules=2, since=since)


@pytest.mark.parametrize("budget", ["0s", "2d", "m", "-1s", "1e3s", "99h", ""])
def test_a_bad_budget_is_refused(mine, budget, monkeypatch):
    monkeypatch.setattr(campaign, "check", lambda *a, **k: pytest.fail("it has begun"))
    assert "budget" in right(mine, 2, budget=budget, code=2).output


def test_options_without_an_effect_are_refused(mine):
    assert "--again" in check(f"{mine}:right", "--again", code=2).output
    assert "--budget" in check("--replay", mine, "--budget", "2s", code=2).output


def test_an_exhaustive_search_is_not_continued(mine, cache):
    right(mine, 2, "--strategy", "exhaustive")
    assert not cache.exists()


def test_kernels_for_which_the_budget_has_no_time_are_named(monkeypatch):
    def slow(*args, budget, since, **more):
        time.sleep(1.5)
        return _passed(*args, **more)

    monkeypatch.setattr(campaign, "check", slow)
    done = check("--budget", "2s")
    assert "the budget has ended before " in done.stderr and 1 <= done.stdout.count("no finding in 20 schedules") <= 2
