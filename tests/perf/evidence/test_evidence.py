"""The evidence kit's machinery: nothing measured is lost or done twice, and no result file is believed blindly."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import tricomm
from tests import forked
from tests.marks import compiles
from tests.perf.evidence import evidence_stages
from tricomm.cli import cli
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.perf.evidence import environment, process_checks, result_schema, runner, stage_process
from tricomm.perf.evidence.__main__ import main
from tricomm.perf.evidence.journal import Journal
from tricomm.perf.evidence.stage import STREAMS, EvidenceSettings
from tricomm.perf.evidence.stages import STAGES, faults, find, first, sanitizer


@pytest.fixture
def settings(tmp_path):
    return EvidenceSettings(tmp_path / "out", None, True)


def run(name, settings, say=lambda text: None, processes=evidence_stages.InThisProcess, **more):
    stage = find(f"{evidence_stages.HERE}:{name}")
    (result,) = runner.run([stage], settings, say, processes=processes, **more)
    assert result_schema.problems(result) == []
    assert result_schema.read_all(settings.out / "evidence.zip") == [result]
    return result


def ran(settings):
    path = settings.out.parent / "runs.txt"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def states(result):
    return {case["key"]: case["status"] for case in result["cases"]}


def test_a_stage_that_goes_well_is_not_run_again(settings):
    result = run("GOOD", settings)
    assert result["status"] == "ok" and result["simulated"] and states(result) == dict.fromkeys("abc", "ok")
    assert [case["data"] for case in result["cases"]] == [{"value_us": 1.5, "key": key} for key in "abc"]
    said = []
    assert run("GOOD", settings, said.append)["cases"] == result["cases"]
    assert ran(settings) == ["a", "b", "c"] and said == ["goes on with 3 cases of an earlier run"]


def test_what_other_sources_have_measured_is_put_aside_and_measured_again(settings, monkeypatch):
    run("GOOD", settings)
    facts = environment.facts(settings)
    for turn, (name, again) in enumerate((("commit", False), ("sources", True), ("processor", True)), 1):
        facts = {**facts, name: f"another {turn}"}
        monkeypatch.setattr(environment, "facts", lambda settings, facts=facts: facts)
        before, said = len(ran(settings)), []
        result = run("GOOD", settings, said.append)
        assert (len(ran(settings)) > before) == again, name
        if again:
            assert said[0] == f"starts anew: {name} changed; the journal before is in aside.zip"
            assert result["environment"][name] == f"another {turn}"
    with zipfile.ZipFile(settings.out / "aside.zip") as aside:
        assert aside.namelist() == ["1.jsonl", "2.jsonl"]
        kept = aside.read("1.jsonl").decode()
    assert '"key": "c"' in kept and "another" not in kept


def test_the_sources_are_what_lies_on_the_disk(tmp_path, monkeypatch):
    for folder in ("tricomm/tables", "perf"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tricomm" / "perf").symlink_to(tmp_path / "perf")
    monkeypatch.setattr(tricomm, "__file__", str(tmp_path / "tricomm" / "__init__.py"))
    seen = [environment.sources()]
    for name, text in (("tricomm/__init__.py", "1"), ("perf/deep.py", "1"), ("perf/deep.py", "2"),
                       ("tricomm/tables/a.json", "{}")):  # fmt: skip
        (tmp_path / name).write_text(text)
        seen.append(environment.sources())
    assert len(set(seen)) == len(seen)
    (tmp_path / "perf" / "deep.cpython-311.pyc").write_text("compiled")
    assert environment.sources() == seen[-1]


def test_wrong_and_missing_cases_are_told_apart_and_only_the_wrong_one_is_tried_again(settings):
    result = run("MIXED", settings)
    assert result["status"] == "failed" and "wrong: Wrong: 3 is not 4" in result["reason"]
    assert states(result) == {"fine": "ok", "wrong": "failed", "missing": "skipped", "last": "ok"}
    assert not runner.good([result], True)
    run("MIXED", settings)
    assert ran(settings) == ["fine", "wrong", "missing", "last", "wrong"]
    result = run("PARTLY", EvidenceSettings(settings.out.parent / "other", None, True))
    assert result["status"] == "incomplete" and "missing: no such library" in result["reason"]
    assert runner.good([result], False)


def test_a_process_that_dies_or_hangs_costs_its_case_only(settings, monkeypatch, forked_workers):
    monkeypatch.setenv("KIT", "other")
    result = run("DYING", settings, processes=stage_process.StageProcesses)
    assert states(result) == {"before": "ok", "crash": "crashed", "hang": "timeout", "after": "ok"}
    assert result["status"] == "failed" and "exit code -9" in result["reason"]
    assert "no end within 1.5 s" in result["cases"][2]["reason"] and result["cases"][2]["seconds"] < 200
    assert ran(settings) == ["before", "crash", "hang", "after"]
    assert (settings.out / "log.txt").read_text().startswith("set ")  # and not what the caller had set


def test_a_process_that_cannot_start_is_started_once(settings, forked_workers):
    result = run("BROKEN", settings, processes=stage_process.StageProcesses)
    assert result["status"] == "crashed" and "Wrong: no such machine" in result["reason"]
    assert [left["key"] for left in result["left"]] == ["never", "neither"] and not result["cases"]
    assert not runner.good([result], True)


def test_a_run_that_is_killed_anywhere_loses_nothing_that_had_ended(settings):
    asked = [sys.executable, "-m", "tricomm.perf.evidence", "--dry-run", "--out", str(settings.out), "--stage"]
    process = forked.Popen([*asked, f"{evidence_stages.HERE}:SLOW"], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 100
    while len(ran(settings)) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1.0)
    begun = len(ran(settings))
    done = {key: case for (_, key), case in Journal.of(settings.out).ended.items()}
    assert len(done) >= 3 and {case["status"] for case in done.values()} == {"ok"}
    with (settings.out / "journal.jsonl").open("a") as file:
        file.write('{"key": "half a li')
    time.sleep(1.0)
    assert len(ran(settings)) == begun  # the process that ran cases has gone, too
    result = run("SLOW", settings, budget=5.0)
    assert all(states(result)[key] == "ok" for key in done)
    assert all(ran(settings).count(key) == 1 for key in done)


def test_a_stage_that_cannot_run_says_why_and_the_others_run(settings, monkeypatch, capsys):
    monkeypatch.setattr(runner.run, "__defaults__", (math.inf, evidence_stages.InThisProcess, time.monotonic))
    assert run("MISSING", settings)["status"] == "skipped"
    names = [f"{evidence_stages.HERE}:{name}" for name in ("MISSING", "GOOD")]
    arguments = [word for name in names for word in ("--stage", name)]
    assert main([*arguments, "--out", str(settings.out)]) == 1
    said = capsys.readouterr().out
    assert "no GPU of the kind" in said and "good: ok" in said
    assert main(["--stage", "nonsense", "--out", str(settings.out)]) == 2
    assert main(["--peers", str(settings.out / "none"), "--out", str(settings.out)]) == 2


@pytest.mark.parametrize("budget", ["0", "-5m", "25x", "0s", "", "9 minutes"])
def test_a_budget_that_cannot_be_is_refused(settings, capsys, budget):
    assert main([f"--budget={budget}", "--out", str(settings.out)]) == 2
    assert f"budget {budget!r}: a time like 90s, 5m or 1h is needed" in capsys.readouterr().err
    assert not settings.out.exists()


def test_without_a_gpu_every_stage_that_needs_one_says_so(tmp_path, capsys):
    assert main(["--stage", "streams", "--stage", "device_time", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("skipped: no CUDA device is visible") == 2


def test_stages_have_the_environment_that_they_need(monkeypatch):
    for name in STREAMS:
        monkeypatch.delenv(name, raising=False)
    results = {stage.name: stage_process.environment(stage) for stage in STAGES}
    eager = {name for name, it in results.items() if it.get("CUDA_MODULE_LOADING") == "EAGER"}
    many = {name for name, it in results.items() if it.get("CUDA_DEVICE_MAX_CONNECTIONS") == "32"}
    assert eager == many == {"first_streams", "streams", "device_time"}
    assert results["sanitizer"]["CUDA_MODULE_LOADING"] == "LAZY"
    assert not {name for name, it in results.items() if "CUDA_MODULE_LOADING" in it} - eager - {"sanitizer"}


def test_the_sanitizer_watches_ranks_that_are_processes(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        process_checks, "run_workers", lambda *how: asked.append(how) or [(n, {"wrong": []}) for n in (0, 1)]
    )
    command = sanitizer.command("memcheck", "tool", tmp_path / "log", 2, "all_reduce")
    assert ["--target-processes", "all"] == command[3:5] and command[-3:] == [
        "tricomm.perf.evidence.process_checks", "2", "all_reduce"]  # fmt: skip
    assert process_checks.main(2, "all_reduce") == 0
    assert asked[0][:2] == ("tricomm.perf.evidence.process_checks:rank_main", 2)
    known = {k.name for k in registry.of("all_reduce", 2) if compiles(k)}
    assert set(asked[0][2]["kernels"]) == known and process_checks.main(3) == 1


def test_a_call_that_stops_other_threads_is_found():
    assert first.ticked(lambda: time.sleep(0.1))["ticks"] > 1

    def holding():  # the GIL: this switch interval is longer than the call
        end = time.perf_counter() + 0.1
        while time.perf_counter() < end:
            pass

    before = sys.getswitchinterval()
    sys.setswitchinterval(5.0)
    try:
        with pytest.raises(Exception, match="the GIL is held during driver calls"):
            first.ticked(holding)
    finally:
        sys.setswitchinterval(before)


# Says which processes have compiled, and hangs. They are forked: each would import torch.
COMPILING = """
import json, multiprocessing, time
context = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method: context
from tricomm.kernels.collectives import registry
from tricomm.perf.evidence import checks, compiling
kernel = registry.find("barrier", "one_shot", "simple")
jobs = compiling.jobs(kernel, 2, 90, {"float32": checks.calls(kernel, 2, "float32", True)}, checks.options(True))
assert len(jobs) == 1
compiling.all_of(jobs, in_this_process=False)
bad = (*jobs[0][:1], {**jobs[0][1], "num_warps": 3}, *jobs[0][2:])
try:
    compiling.all_of([bad, *jobs], in_this_process=False)
except Exception as error:
    assert "1 of 2 variants do not compile: barrier" in str(error), error
    print(json.dumps(list(compiling._workers()._processes)), flush=True)
    time.sleep(600)
"""


def alive(pid):
    return process_state(pid) not in ("", "Z")


def process_state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


ONE = {"key": "a", "status": "ok", "reason": "", "seconds": 1, "data": {}}
BAD = {
    "no object": ([], "an object is needed"),
    "schema": ({"schema": "other/2"}, "schema 'other/2' is not known"),
    "status": ({"status": "great"}, "status 'great' is none of"),
    "seconds": ({"seconds": "long"}, "'seconds' is missing or of another type"),
    "environment": ({"environment": {"date": "today"}}, "environment lacks 'device'"),
    "twice": ({"cases": [ONE] * 2}, "'a' is there twice"),
    "case": ({"cases": [{"key": "a"}]}, "case 0: 'status' is missing"),
    "lie": ({"status": "ok", "cases": [{**ONE, "status": "failed"}]},
            "status is ok, and there are cases that are failed"),
    "left": ({"left": [{"key": "a"}]}, "left 0: 'reason' is missing"),
    "hidden": ({"left": [{"key": "a", "reason": "b"}]}, "status is ok, and 1 cases were left"),
    "number": ({"cases": [{**ONE, "data": {"x": [{"busbw_gbps": 1e9}]}}]},
               r"busbw_gbps is 1000000000.0, expected 0 to 20000"),
    "negative": ({"cases": [{**ONE, "data": {"median_us": -1}}]},
                 "median_us is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_result_that_cannot_be_is_refused(settings, name):
    change, words = BAD[name]
    result = run("GOOD", settings)
    path = settings.out / "foreign.json"
    path.write_text(json.dumps({**result, **change} if isinstance(change, dict) else change))
    with pytest.raises(InvalidArgument, match=words):
        result_schema.read_all(path)
    with zipfile.ZipFile(settings.out / "evidence.zip", "a") as archive:
        verified = CliRunner().invoke(cli, ["evidence", "verify", archive.filename])
        archive.write(path, path.name)
    assert verified.exit_code == 0 and "good: ok, 3 cases" in verified.output
    for bad in (path, archive.filename):
        done = CliRunner().invoke(cli, ["evidence", "verify", str(bad)])
        assert done.exit_code == 1 and words.replace("\\", "") in done.output


def _cut(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def _broken(whole: bytes) -> bytes:
    """The first file in it has other bytes."""
    return whole[:100] + bytes(40) + whole[140:]


CUT = "this archive is cut off or broken: "
NEEDED = "; an evidence.zip of `python -m tricomm.perf.evidence` is needed, or the JSON of one of its stages"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda whole: b"", f"the file is empty{NEEDED}"),
        (lambda whole: b"\x89PNG" + whole, "neither an archive nor JSON ('utf-8' codec can't decode"),
        (lambda whole: b"hello", f"neither an archive nor JSON (Expecting value: line 1 column 1 (char 0)){NEEDED}"),
        (_cut, f"{CUT}its directory cannot be read (File is not a zip file); copy it again"),
        (_broken, f"{CUT}good.json cannot be read ("),
        (lambda whole: b"[" * 100_000, f"JSON that is nested deeper than any result{NEEDED}"),
    ],
    ids=["empty", "binary", "text", "cut", "broken", "nested"],
)
@pytest.mark.parametrize("name", ["evidence.zip", "evidence"])
def test_a_file_that_is_no_whole_archive_is_named(settings, change, words, name):
    run("GOOD", settings)
    path = settings.out / "elsewhere" / name
    path.parent.mkdir()
    path.write_bytes(change((settings.out / "evidence.zip").read_bytes()))
    done = CliRunner().invoke(cli, ["evidence", "verify", str(path)])
    assert done.exit_code == 1 and done.output.startswith(f"{path}: {words}"), done.output


def test_an_archive_is_one_by_its_bytes_and_names_what_is_wrong_in_it(settings):
    run("GOOD", settings)
    path = settings.out / "copy"
    path.write_bytes((settings.out / "evidence.zip").read_bytes())
    assert [result["stage"] for result in result_schema.read_all(path)] == ["good"]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other.json", "{")
    with pytest.raises(InvalidArgument, match=r"copy: other\.json is no JSON \(Expecting"):
        result_schema.read_all(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "none")
    with pytest.raises(InvalidArgument, match="copy: no result is in this archive; an evidence.zip"):
        result_schema.read_all(path)


def test_the_summary_names_the_kernels_that_this_triton_does_not_compile(settings, monkeypatch):
    monkeypatch.setattr(registry.wide_words, "why_not", lambda architecture: None)
    run("GOOD", settings)
    summary = settings.out / "summary.md"
    assert "left out" not in summary.read_text() and "Nothing: every case had its turn." in summary.read_text()
    monkeypatch.setattr(registry.wide_words, "why_not", lambda architecture: "Triton 3.6.0 is old")
    run("GOOD", settings)
    (line,) = [text for text in summary.read_text().splitlines() if "left out" in text]
    wide = [k.name for k in (*registry.KERNELS, *registry.FUSED) if k.wide]
    assert wide[0] == "all_reduce_one_shot_ll128" and "all_reduce_rms_norm_two_shot_ll128" in wide
    named = [name for name in wide if not name.startswith("all_reduce_rows")]
    assert line == f"* left out: {', '.join(named)}: Triton 3.6.0 is old"


def test_what_a_fault_has_to_give_is_held_to(settings):
    results = {"error": "PeerDied", "text": "rank 1", "after_s": 1.0}
    assert faults.judged("killed", results, False)["after_s"] == 1.0
    for bad, words in (({"error": "GroupAborted"}, "expected PeerDied"), ({"after_s": 2.5}, "expected 2 s")):
        with pytest.raises(Exception, match=words):
            faults.judged("killed", {**results, **bad}, False)


def test_the_sanitizers_verdict():
    good, bad = "===== ERROR SUMMARY: 0 errors", "===== Invalid __global__ read\n===== ERROR SUMMARY: 1 error"
    races = "===== RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
    assert sanitizer.judged(0, [good, good, ""], "", 2)["summary"] == "ERROR SUMMARY: 0 errors"
    for code, logs, words in ((0, [good, bad], "1 error: "), (0, [good, races], "2 hazards"),
                              (1, [good, good], "exit code 1"), (0, [good], "1 verdicts of 2 ranks")):  # fmt: skip
        with pytest.raises(Exception, match=words):
            sanitizer.judged(code, logs, "", 2)


def test_compiling_on_all_cores_leaves_no_process_behind():
    with forked.Popen([sys.executable, "-c", COMPILING], stdout=subprocess.PIPE) as process:
        pids = json.loads(process.stdout.readline())
        process.kill()
    end = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert pids and not any(alive(pid) for pid in pids)


FAULTS = pytest.param("faults", marks=pytest.mark.soak)  # the same ranks as of the killed peer, which waits for less


@pytest.mark.parametrize("name", ["first_streams", "streams", "processes", FAULTS, "device_time", "host_path"])
def test_a_dry_run_goes_through_every_stage(tmp_path, name, forked_workers):
    """Those of several GPUs and of peers have a test of their own; the first one has the test of a bare checkout."""
    (result,) = runner.run(
        [find(name)], EvidenceSettings(tmp_path, None, True), print, processes=evidence_stages.InThisProcess
    )
    assert result["simulated"] and result["cases"] and not result["left"]
    assert result["status"] == ("incomplete" if name == "host_path" else "ok"), result["reason"]


def test_a_dry_run_ends_within_its_budget_and_says_what_it_has_left(tmp_path):
    began = time.monotonic()
    asked = ("-m", "tricomm.perf.evidence", "--dry-run", "--budget", "8s", "--out", str(tmp_path))
    done = forked.script(*asked, timeout=250)
    assert time.monotonic() - began < 30 and done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "summary.md").read_text()
    assert "simulated" in text.splitlines()[0] and "cases were not run; the same command goes on" in done.stdout
    results = {result["stage"]: result for result in result_schema.read_all(tmp_path / "evidence.zip")}
    assert list(results) == [stage.name for stage in STAGES]
    assert any(f"* many_gpus, {len(results['many_gpus']['left'])} (the budget was over" in s for s in text.splitlines())
    assert len(list(tmp_path.iterdir())) <= 8
