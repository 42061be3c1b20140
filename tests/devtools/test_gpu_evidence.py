"""The driver of the GPU evidence, with small scripts for its commands, and pytest on generated files."""

import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from devtools.gpu_evidence import children, report
from devtools.gpu_evidence.__main__ import main
from devtools.gpu_evidence.report import Journal
from devtools.gpu_evidence.steps import Step, all_steps, bench
from tests.ranks import BUSY
from tests.wheel_gate import ROOT

HERE = {"date": "2026-01-01", "commit": "a", "sources": "s", "device": ["GPU"], "versions": {"torch": "2.11"}}
# Tests in place of the GPU tests: each writes a line when it runs.
TESTS = """
import os, signal, time
import pytest
from _pytest.mark.expression import Expression

@pytest.fixture(autouse=True)
def ran(request):
    with open({ran!r}, "a") as file:
        file.write(request.node.name + "\\n")

def test_one(record_property):
    record_property("median_us", 1.5)
def test_bad():
    assert 3 == 4, "three is not four"
def test_missing():
    pytest.skip("no such library")
def test_crash():
    os.kill(os.getpid(), signal.SIGKILL)
def test_hang():
    time.sleep(600)
@pytest.mark.parametrize("number", range(40))
def test_slow(number):
    time.sleep(0.3)
"""


@pytest.fixture
def tests(tmp_path):
    """Write the tests' file; return a step of the tests that match a keyword."""
    file = tmp_path / "test_made.py"
    file.write_text(TESTS.replace("{ran!r}", repr(str(tmp_path / "ran.txt"))))

    def step(keyword, name="tests", **more):
        options = "-m pytest -p devtools.gpu_evidence.children -p no:cacheprovider -o addopts= -k".split()
        command = (sys.executable, *options, keyword, str(file))
        return Step(name, command, **{"limit": 60.0, **more})

    return step


def script(name, code="", **more):
    """A command other than pytest, like the benchmark; it writes a line when it runs."""
    here = f"open('ran.txt', 'a').write({name + chr(10)!r})"
    code = f"import os, time; os.chdir(os.environ['RAN']); {here}; {code}"
    return Step(name, (sys.executable, "-c", code), **{"tests": False, "share": None, **more})


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The names of the steps and tests that ran, in order."""
    monkeypatch.setenv("RAN", str(tmp_path))
    return lambda: (tmp_path / "ran.txt").read_text().split() if (tmp_path / "ran.txt").exists() else []


# In another process, because the driver kills all its descendants.
DRIVER = """
import json, sys, time
from pathlib import Path
from devtools.gpu_evidence.__main__ import run
from devtools.gpu_evidence.steps import Step
out, steps, environment, seconds = json.loads(sys.argv[1])
sys.exit(not run(Path(out), [Step(**step) for step in steps], environment, time.monotonic() + seconds, least=0.5))
"""


def driver(folder, steps, seconds=math.inf, environment=HERE):
    asked = json.dumps([str(folder / "out"), [asdict(step) for step in steps], environment, seconds])
    return subprocess.Popen([sys.executable, "-c", DRIVER, asked], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def told(folder, steps, seconds=math.inf, environment=HERE):
    """Run steps as the command does; return whether all passed, and the journal."""
    with driver(folder, steps, seconds, environment) as process:
        print(process.communicate()[0])
    return process.returncode == 0, Journal(folder / "out")


def test_steps_run_in_order_and_a_failed_one_leaves_out_its_dependents_alone(tmp_path, ran):
    steps = [
        script("first"),
        script("bad", "print('no such machine'); os._exit(3)"),
        script("free"),
        script("needs bad", needs=("first", "bad")),
        script("needs it", needs=("needs bad",)),
    ]
    good, journal = told(tmp_path, steps)
    assert not good and ran() == ["first", "bad", "free"]
    wanted = {"first": "passed", "bad": "failed", "free": "passed", "needs bad": "skipped", "needs it": "skipped"}
    assert {name: record["outcome"] for name, record in journal.steps.items()} == wanted
    assert "no such machine" in journal.steps["bad"]["reason"]
    assert journal.steps["needs bad"]["reason"] == "needs bad, which has not passed"
    good, journal = told(tmp_path, [*steps[:1], script("bad"), *steps[2:3], script("needs bad")])
    assert good and ran()[3:] == ["bad", "needs", "bad"]  # those that had passed are not repeated


def test_tests_that_fail_crash_or_hang_cost_only_themselves_and_are_tried_again_later(tmp_path, tests, ran):
    step = tests("not slow", limit=10.0)
    good, journal = told(tmp_path, [step])
    assert not good and ran() == ["test_one", "test_bad", "test_missing", "test_crash", "test_hang"]
    by_name = {name.rpartition("::")[2]: record for name, record in journal.tests.items()}
    outcomes = ["passed", "failed", "skipped", "crashed", "timeout"]
    assert [by_name[name]["outcome"] for name in ran()] == outcomes
    assert by_name["test_one"]["data"] == {"median_us": 1.5} and "three is not four" in by_name["test_bad"]["reason"]
    assert "no such library" in by_name["test_missing"]["reason"]
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "| tests | failed | 1 | 3 | 1 | 0 |" in summary and "test_one | median_us 1.5 |" in summary
    told(tmp_path, [tests("one or bad or missing")])
    assert ran()[5:] == ["test_bad"]


def test_the_budget_is_kept_and_three_commands_do_the_work_of_one(tmp_path, tests, ran):
    step = tests("slow")
    good, journal = told(tmp_path, [step], 0.1)
    assert good and not ran() and not journal.steps  # too short to start anything
    for _ in range(12):  # on a busy machine pytest may take most of a budget to start
        good, journal = told(tmp_path, [step], 9.0)
        assert good and journal.steps["tests"]["seconds"] < 9.0 + BUSY
        if journal.steps["tests"]["outcome"] == "passed":
            break
        assert journal.steps["tests"]["outcome"] == "cut"
        waiting = journal.waiting("tests")  # empty if pytest had no time to list the tests
        left = f"* tests, {len(waiting)}: " if waiting else "* tests: cut off"
        assert left in (tmp_path / "out" / "summary.md").read_text()
    assert journal.run > 1 and set(ran()) == {f"test_slow[{n}]" for n in range(40)}
    assert len(ran()) - 40 <= 2 * journal.run  # only a test that was running when its step's time ended is repeated


def test_a_step_ends_with_its_share_and_continues_when_the_others_have_ended(tmp_path, ran):
    steps = [script("long", "time.sleep(5)", share=1.0), script("short", share=3.0)]
    good, journal = told(tmp_path, steps, 16.0)
    assert good and ran() == ["long", "short", "long"]
    assert {record["outcome"] for record in journal.steps.values()} == {"passed"}


def test_a_driver_that_is_killed_leaves_no_process_and_the_next_one_continues(tmp_path, tests, ran):
    process = driver(tmp_path, [tests("slow")])
    end = time.monotonic() + 60
    while len(ran()) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(0.5)
    begun = len(ran())
    with (tmp_path / "out" / "journal.jsonl").open("a") as file:
        file.write('{"event": "test", "test": "half a li')
    time.sleep(0.5)
    assert 4 <= len(ran()) == begun < 40
    done = [test for test, record in Journal(tmp_path / "out").tests.items() if record["outcome"] == "passed"]
    assert len(done) >= begun - 1
    good, _ = told(tmp_path, [tests("slow")])
    assert good and all(ran().count(test.rpartition("::")[2]) == 1 for test in done) and len(set(ran())) == 40


def test_processes_that_a_command_leaves_are_killed(tmp_path, ran):
    code = "import subprocess; subprocess.Popen(['sleep', '77.25'], start_new_session=True)"
    told(tmp_path, [script("leaves", code)])
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
    assert not any(b"77.25" in command for command in commands)


def test_other_sources_or_another_machine_start_a_new_record(tmp_path, ran, capsys):
    for name, again in (("commit", False), ("sources", True), ("device", True)):
        told(tmp_path, [script("one")])
        before = len(ran())
        told(tmp_path, [script("one")], environment={**HERE, name: ["another"]})
        assert (len(ran()) > before) == again, name
        (tmp_path / "out" / "journal.jsonl").unlink()
    assert "starts anew, because device changed; journal-2.jsonl has the earlier results" in capsys.readouterr().out


CALL = {"collective": "all_reduce", "dtype": "bfloat16", "op": "sum", "mode": "graph", "size_bytes": 1024}
ROW = {**CALL, "library": "tricomm", "algorithm": "one_shot", "protocol": "ll"}
ROW |= {"in_place": {"p50_us": 3.0, "busbw_gbs": 1.0}, "out_of_place": {"p50_us": 2.0, "busbw_gbs": 2.0}}
NCCL = {**CALL, "library": "nccl", "algorithm": "nccl", "protocol": "-"}
NCCL |= {"in_place": {"p50_us": 6.0, "busbw_gbs": 0.5}, "out_of_place": None}


def test_a_ratio_is_of_the_same_call_in_the_same_place():
    cells = list(report.bench_cells([ROW, NCCL, {**NCCL, "size_bytes": 2048}]))
    assert [cell[3:] for cell in cells] == [
        ("tricomm one_shot/ll", "2", "2", ""),
        ("nccl nccl", "6", "0.5", "2.00"),
        ("nccl nccl", "6", "0.5", ""),
    ]


def test_the_archive_has_everything_and_the_summary_names_the_machine_and_the_rows(tmp_path, ran):
    out = tmp_path / "out"
    lines = [{"event": "bench", "step": "rows"}] + [{"event": "row", "step": "rows", "row": row} for row in (ROW, NCCL)]
    code = f"open({str(out / 'journal.jsonl')!r}, 'a').write({''.join(json.dumps(x) + chr(10) for x in lines)!r})"
    good, _ = told(tmp_path, [script("rows", code), script("other")], environment={**HERE, "left_out": ["left out: k"]})
    assert good
    summary = (out / "summary.md").read_text()
    assert "2026-01-01, 1 x GPU" in summary and "torch 2.11" in summary and "* left out: k" in summary
    assert "| rows | all_reduce | 1024 | graph | nccl nccl | 6 | 0.5 | 2.00 |" in summary
    with tarfile.open(out / "evidence.tar.gz") as archive:
        assert set(archive.getnames()) == {"journal.jsonl", "log.txt", "summary.md"}
        assert archive.extractfile("summary.md").read().decode() == summary


def test_rows_of_the_benchmark_are_in_the_journal_and_in_a_file(tmp_path):
    environment = {
        "GPU_EVIDENCE": json.dumps({"folder": str(tmp_path), "step": "a b, c", "end": 0.0}),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = bench("a b, c", 2, "all_reduce", "1K", "gloo").command
    asked = json.dumps({**json.loads(command[-1]), "modes": "eager"})
    done = subprocess.run(
        [*command[:-1], asked], env=os.environ | environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "2 rows, 0 wrong elements" in done.stdout, done.stderr
    rows = Journal(tmp_path).rows["a b, c"]
    assert [row["library"] for row in rows] == ["tricomm", "gloo"]
    assert json.loads((tmp_path / "a-b-c.json").read_text())["results"] == rows
    assert [cell[3].split()[0] for cell in report.bench_cells(rows)] == ["tricomm", "gloo"]


def test_the_digest_is_of_the_sources_on_disk(tmp_path):
    for folder in ("tricomm", "perf"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tricomm" / "perf").symlink_to(tmp_path / "perf")
    seen = [children.sources(tmp_path / "tricomm")]
    for name, text in (("tricomm/a.py", "1"), ("perf/deep.py", "1"), ("perf/deep.py", "2"), ("tricomm/b.json", "")):
        (tmp_path / name).write_text(text)
        seen.append(children.sources(tmp_path / "tricomm"))
    assert len(set(seen)) == len(seen)
    (tmp_path / "perf" / "deep.pyc").write_text("compiled")
    assert children.sources(tmp_path / "tricomm") == seen[-1]


@pytest.mark.parametrize("budget", ["0", "-5m", "25x", ""])
def test_an_invalid_budget_is_refused(tmp_path, capsys, budget):
    assert main([f"--budget={budget}", "--out", str(tmp_path / "out")]) == 2
    assert f"budget {budget!r}: a time like 90s, 5m or 1h is needed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_machine_without_a_gpu_is_refused(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device is visible here" in capsys.readouterr().err


def selects(step, test):
    """Whether a step's pytest command selects a test."""
    words = list(step.command)
    keyword = Expression.compile(words[words.index("-k") + 1]) if "-k" in words else None
    places = tuple(word for word in words if word.startswith("tests/"))
    name = test[test.rindex("/", 0, test.index("::")) :]
    return test.startswith(places) and (keyword is None or keyword.evaluate(lambda word: word in name))


def test_every_gpu_test_is_in_a_step_and_every_step_has_some():
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    tests = {line for line in done.stdout.splitlines() if line.startswith("tests/gpu/")}
    chosen = {step.name: {test for test in tests if selects(step, test)} for step in all_steps(2) if step.tests}
    assert all(chosen.values()), {name for name, some in chosen.items() if not some}
    assert set.union(*chosen.values()) == tests
    assert not any("8ranks" in test for test in chosen["streams, one size"])
