"""The evidence kit's machinery: nothing measured is lost or done twice, and no result file is believed blindly."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner

import tricomm
from tests.perf import evidence_stages
from tricomm.cli import cli
from tricomm.errors import InvalidArgument
from tricomm.kernels import registry
from tricomm.kernels.collectives import COLLECTIVES
from tricomm.kernels.dtypes import DTYPES, reduction
from tricomm.perf.evidence import calling, checks, environment, runner, schema, small_calls, summary
from tricomm.perf.evidence.__main__ import main
from tricomm.perf.evidence.journal import Journal
from tricomm.perf.evidence.stage import Settings
from tricomm.perf.evidence.stages import STAGES, faults, find, sanitizer
from tricomm.perf.evidence.stages import compile as compile_stage


@pytest.fixture
def settings(tmp_path):
    return Settings(tmp_path / "out", None, True)


def run(name, settings):
    result = runner.run(find(f"{evidence_stages.HERE}:{name}"), settings, lambda text: None)
    assert schema.problems(result) == []
    assert schema.read(settings.out / f"{result['stage']}.json") == result
    return result


def ran(settings):
    path = settings.out / "runs.txt"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def states(result):
    return {case["key"]: case["status"] for case in result["cases"]}


def test_a_stage_that_goes_well_is_not_run_again(settings):
    result = run("GOOD", settings)
    assert result["status"] == "ok" and result["simulated"] and states(result) == dict.fromkeys("abc", "ok")
    assert [case["data"] for case in result["cases"]] == [{"value_us": 1.5, "key": key} for key in "abc"]
    assert run("GOOD", settings)["cases"] == result["cases"]
    assert ran(settings) == ["a", "b", "c"]


def test_what_was_measured_elsewhere_is_put_aside_and_measured_again(settings, monkeypatch):
    run("GOOD", settings)
    facts = environment.facts(settings)
    monkeypatch.setattr(environment, "facts", lambda settings: {**facts, "commit": "another"})
    assert run("GOOD", settings)["environment"]["commit"] == "another"
    assert ran(settings) == list("abcabc")
    kept = (settings.out / "good.1.jsonl").read_text()
    assert '"key": "c"' in kept and '"commit": "another"' not in kept


def test_wrong_and_missing_cases_are_told_apart_and_only_the_wrong_one_is_tried_again(settings):
    result = run("MIXED", settings)
    assert result["status"] == "failed" and "wrong: Wrong: 3 is not 4" in result["reason"]
    assert states(result) == {"fine": "ok", "wrong": "failed", "missing": "skipped", "last": "ok"}
    run("MIXED", settings)
    assert ran(settings) == ["fine", "wrong", "missing", "last", "wrong"]
    result = run("PARTLY", settings)
    assert result["status"] == "incomplete" and "missing: no such library" in result["reason"]


def test_a_crash_costs_its_case_only(settings):
    result = run("CRASHING", settings)
    assert states(result) == {"before": "ok", "crash": "crashed", "after": "ok"}
    assert result["status"] == "failed" and "exit code -9" in result["reason"]
    assert ran(settings) == ["before", "crash", "after"]


def test_a_case_that_hangs_is_ended_at_its_limit(settings):
    began = time.monotonic()
    result = run("HANGING", settings)
    assert states(result) == {"before": "ok", "hang": "timeout", "after": "ok"}
    assert time.monotonic() - began < 200


def test_a_stage_that_is_too_long_goes_on_where_it_was(settings):
    first = run("SLOW", settings)
    assert first["status"] == "timeout" and "run it again to go on" in first["reason"]
    done = [key for key, state in states(first).items() if state == "ok"]
    second = run("SLOW", settings)
    assert set(done) < {key for key, state in states(second).items() if state == "ok"}
    assert all(ran(settings).count(key) == 1 for key in done)


def test_a_run_that_is_killed_anywhere_loses_nothing_that_had_ended(settings):
    asked = [sys.executable, "-m", "tricomm.perf.evidence", "--dry-run", "--out", str(settings.out), "--stage"]
    process = subprocess.Popen([*asked, f"{evidence_stages.HERE}:SLOW"], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 100
    while len(ran(settings)) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1.0)
    done = [key for key, case in Journal.of(evidence_stages.SLOW, settings).ended.items() if case["status"] == "ok"]
    assert len(done) >= 3
    with (settings.out / "slow.jsonl").open("a") as file:
        file.write('{"key": "half a li')
    result = run("SLOW", settings)
    assert all(states(result)[key] == "ok" for key in done)
    assert all(ran(settings).count(key) == 1 for key in done)


def test_a_stage_that_cannot_run_says_why_and_the_others_run(settings):
    assert run("MISSING", settings)["status"] == "skipped"
    names = [f"{evidence_stages.HERE}:{name}" for name in ("MISSING", "GOOD")]
    arguments = [word for name in names for word in ("--stage", name)]
    done = CliRunner().invoke(main, [*arguments, "--out", str(settings.out)])
    assert done.exit_code == 1 and "no GPU of the kind" in done.output and "good: ok" in done.output
    assert CliRunner().invoke(main, ["--stage", "nonsense", "--out", str(settings.out)]).exit_code == 2


def test_without_a_gpu_every_stage_that_needs_one_says_so(tmp_path):
    done = CliRunner().invoke(main, ["--stage", "streams", "--stage", "device_time", "--out", str(tmp_path)])
    assert done.exit_code == 1 and done.output.count("no CUDA device is visible") == 2


def test_the_summary_has_every_stage_and_says_that_it_is_simulated(settings):
    settings.out.mkdir()
    path = summary.write(settings.out)
    text = path.read_text()
    assert all(f"[{stage.title}](#{stage.name}) | not run" in text for stage in STAGES)
    result = run("MIXED", settings)
    (settings.out / "streams.json").write_text(json.dumps({**result, "stage": "streams"}))
    text = summary.write(settings.out).read_text()
    assert "dry run: simulated" in text and "| wrong | failed: Wrong: 3 is not 4 |" in text


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
        schema.read(path)
    done = CliRunner().invoke(cli, ["evidence", "verify", str(settings.out / "good.json"), str(path)])
    assert done.exit_code == 1 and "good: ok, 3 cases" in done.output


def test_what_a_fault_has_to_give_is_held_to(settings):
    found = {"error": "PeerDied", "text": "rank 1", "after_s": 1.0}
    assert faults.judged("killed", found, False)["after_s"] == 1.0
    for bad, words in (({"error": "GroupAborted"}, "expected PeerDied"), ({"after_s": 2.5}, "expected 2 s")):
        with pytest.raises(Exception, match=words):
            faults.judged("killed", {**found, **bad}, False)


def test_the_sanitizers_verdict():
    assert sanitizer.judged(0, "===== ERROR SUMMARY: 0 errors", "")["summary"] == "ERROR SUMMARY: 0 errors"
    for code, log in ((9, "===== Invalid __global__ read\n===== ERROR SUMMARY: 1 error"), (0, "")):
        with pytest.raises(Exception, match="exit code"):
            sanitizer.judged(code, log, "")


@pytest.mark.parametrize(
    "name, worlds",
    [("compile", {2, 4, 8}), ("streams", {2, 4, 8}), ("processes", {2, 4}), ("device_time", {2, 4, 8}),
     ("many_gpus", {8})],
)  # fmt: skip
def test_every_registered_kernel_has_its_cases_and_runs_where_it_can(monkeypatch, tmp_path, name, worlds):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    keys = [case.key for case in find(name).cases(Settings(tmp_path))]
    assert len(keys) == len(set(keys))
    for kernel in registry.KERNELS:
        found = {n for n in (2, 3, 4, 8) for key in keys if {kernel.name, f"{n} ranks"} <= set(key.split("/"))}
        assert found == {8} if kernel.needs_cube else found >= worlds, kernel.name
    assert {(k, 8 if k.needs_cube else 2) for k in registry.KERNELS} == set(small_calls.pairs())
    for kernel in registry.ZERO_COPY:  # which needs ranks that are processes
        found = {n for n in (2, 3, 4, 8) for key in keys if {kernel.name, f"{n} ranks"} <= set(key.split("/"))}
        assert not found if name in ("streams", "device_time") else found >= worlds, kernel.name


@pytest.mark.parametrize("kernel", (*registry.KERNELS, *registry.ZERO_COPY), ids=lambda kernel: kernel.name)
def test_what_is_checked_is_what_was_compiled(kernel):
    jobs = compile_stage.jobs(kernel, 8, 90)
    variants = [(tuple(sorted(constexprs.items())), bits, aligned) for _, constexprs, bits, aligned, _ in jobs]
    assert len(variants) == len(set(variants)) <= 80
    widths = {None} if kernel.collective == "barrier" else {8, 16, 32, 64}
    assert {bits for _, bits, _ in variants} == widths
    if kernel.collective != "barrier":
        in_place = kernel.zero_copy and kernel.algorithm == "two_shot"  # all of a handle, which begins aligned
        places = {True} if in_place else {False, True}
        assert {(bits, aligned) for _, bits, aligned in variants} == set(itertools.product(widths, places))
    reductions = {(dict(values).get("ELEMENT"), dict(values).get("OP")) for values, _, _ in variants}
    wanted = {reduction(dtype, op) for dtype in DTYPES.values() for op in dtype.ops}
    assert reductions == (wanted if kernel.reduces else {(None, None)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_operation_meets_every_size_and_the_others_a_few(dtype):
    found = checks.calls(registry.find("all_reduce", "two_shot", "ll"), 8, dtype, False)
    assert tuple(call.count for call in found[: len(checks.COUNTS)]) == checks.COUNTS
    assert [bool(call.offset) for call in found[: len(checks.COUNTS)]] == [False, True] * 4
    assert {(call.op, call.count) for call in found[len(checks.COUNTS) :]} == set(
        itertools.product(DTYPES[dtype].ops[1:], checks.OTHERS)
    )
    assert not any(call.offset for call in found[len(checks.COUNTS) :])
    cube = next(k for k in registry.KERNELS if k.needs_cube)
    assert checks.calls(cube, 8, dtype, False) and not checks.calls(cube, 4, dtype, False)


def test_what_is_wrong_beside_the_result_is_found(monkeypatch):
    """Results, what lies beside them, inputs, and the memory of a rank that gets nothing."""
    dtype, call = torch.bfloat16, checks.Call(5, "sum", 1)

    def told(comm, collective, spoil):
        def made(comm, name, number, x, y, *more):
            result = right(comm, name, number, x, y, *more)
            spoil(x, y)
            return result

        monkeypatch.setattr(calling, "call", made)
        kernel = next(k for k in registry.KERNELS if k.collective == collective)
        found = checks.wrong(comm, kernel, dtype, [call] * comm.world_size)
        monkeypatch.setattr(calling, "call", right)
        return found

    def beside(y):
        y.as_strided((1,), (1,), y.storage_offset() + len(y)).zero_()

    def body(comm):
        nothing = [told(comm, c, lambda x, y: None) for c in COLLECTIVES]
        return nothing, {
            "result": told(comm, "all_to_all", lambda x, y: y[3:].zero_()),
            "beside": told(comm, "scatter", lambda x, y: beside(y)),
            "input": told(comm, "gather", lambda x, y: x[1:2].zero_()),
            "unasked": told(comm, "gather", lambda x, y: y.zero_()),
            "in place": told(comm, "reduce", lambda x, y: y.zero_()),
        }

    right = calling.call
    for rank, (nothing, found) in enumerate(tricomm.simulate(body, 2, options=checks.FEW_OPTIONS)):
        assert nothing == [[]] * len(COLLECTIVES)
        for texts in (found["result"], found["beside"], found["input"]):
            assert len(texts) == 2 and texts[0].startswith(f"rank {rank}, Call(count=5, op='sum', offset=1): ")
        assert "elements are wrong" in found["result"][0] and "memory beside the output" in found["beside"][0]
        assert "the input was written" in found["input"][0]
        for name in ("unasked", "in place"):  # calls 0 and 1, roots 0 and 1
            kinds = ["elements are wrong" in text for text in found[name]]
            assert kinds == ([True, False] if rank == 0 else [False, True]), found[name]


@pytest.mark.timeout(600)
def test_a_dry_run_goes_through_every_stage(tmp_path):
    done = CliRunner().invoke(main, ["--dry-run", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for stage in STAGES:
        result = schema.read(tmp_path / f"{stage.name}.json")
        assert result["simulated"] and (result["cases"] or stage.name == "sanitizer"), stage.name
    assert "simulated" in (tmp_path / "summary.md").read_text().splitlines()[0]
