"""The evidence kit's budget, on a clock that only cases move: what runs first, when it stops, and what is left."""

from __future__ import annotations

import math
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from tricomm.perf.evidence import compiling, result_schema, runner, stage_process
from tricomm.perf.evidence.schedule import START, Schedule
from tricomm.perf.evidence.stage import FIRST, KILL, SLICE, TWO, EvidenceSettings, Stage, StageCase
from tricomm.perf.evidence.stage_process import CaseOutcome
from tricomm.perf.evidence.stages import STAGES

WRITING = runner._WRITING


class Fake:
    """A machine where each case takes `seconds[stage]` (10 if none is given) and ends as `ends` says ("ok")."""

    def __init__(self, ends=None, **seconds):
        self.now, self.ran, self.told, self.ends, self.seconds = 0.0, [], [], ends or {}, seconds

    def clock(self):
        return self.now

    def processes(self, settings):
        return self

    def run(self, stage, case, left):
        self.ran.append(f"{stage.name}/{case.key}")
        takes = self.seconds.get(stage.name, 10.0)
        self.now += min(takes, left, case.limit)
        if takes > min(left, case.limit):
            return CaseOutcome("timeout", "no end")
        data = {"slice_us": 2000.0} if self.ran[-1] == SLICE else {}
        return CaseOutcome(self.ends.get(self.ran[-1], "ok"), "", data)

    def update(self, settings):
        self.told.append(settings.slice_us)

    def end(self, stage):
        pass

    def close(self):
        pass


def stage(name, *tiers, share=1.0, limit=100.0, **more):
    def cases(settings):
        return [StageCase(f"{tier}-{n}", lambda: {}, limit=limit, tier=tier) for n, tier in enumerate(tiers)]

    return Stage(name, name, cases, share=share, **more)


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.environment, "facts", lambda settings: {"date": "", "device": "one", "versions": {}})
    return EvidenceSettings(tmp_path / "out", None, True)


def run(machine, settings, stages, budget, say=lambda text: None):
    results = runner.run(stages, settings, say, budget, machine.processes, machine.clock)
    assert all(result_schema.problems(result) == [] for result in results)
    return {result["stage"]: result for result in results}


def left(result):
    return {case["key"]: case["reason"] for case in result["left"]}


def test_value_decides_and_stages_take_turns(out):
    machine = Fake()
    stages = [stage("right", 0, 0, 1, 3), stage("fast", 0, 1), stage("ready", FIRST)]
    results = run(machine, out, stages, 1000.0)
    assert machine.ran == ["ready/-1-0", "right/0-0", "right/0-1", "fast/0-0", "right/1-2", "fast/1-1", "right/3-3"]
    assert {result["status"] for result in results.values()} == {"ok"}


def test_one_size_of_every_kernel_comes_before_any_second_size(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    pairs = [(stage, list(stage.cases(EvidenceSettings(tmp_path)))) for stage in STAGES if stage.name != "many_gpus"]
    order = [entry.key for entry in Schedule.of(pairs).waiting]
    first = next(n for n, (name, _) in enumerate(order) if not name.startswith("first"))
    assert {name for name, _ in order[:first]} == {"first", "first_streams"} and first <= 8
    small = [n for n, (name, key) in enumerate(order) if name == "streams" and key.endswith("/2 ranks/one size")]
    timed = [n for n, (name, key) in enumerate(order) if name == "device_time" and key.endswith("/2 ranks/65536 bytes")]
    second = [n for n, (_, key) in enumerate(order) if key.endswith(("/every size", "/4 ranks/one size", "/8192 bytes"))
              or (key.endswith("/8 ranks/one size") and "cube" not in key)]  # fmt: skip
    assert len(small) > 10 and max(small) < min(timed) and max(timed) < min(second)


@pytest.mark.parametrize("seconds", [1.0, 7.0, 40.0, 500.0])
def test_the_budget_is_kept(out, seconds):
    machine = Fake(slow=seconds)
    stages = [stage("slow", *[0] * 50), stage("quick", *[0] * 5, *[1] * 50)]
    results = run(machine, out, stages, 120.0)
    assert machine.now <= 120.0
    for name, number in (("slow", 50), ("quick", 55)):
        assert len(results[name]["cases"]) + len(results[name]["left"]) == number
    assert results["quick"]["cases"], "the slow stage has taken it all"


def test_a_stage_stops_when_its_share_is_over_and_what_is_left_goes_to_all(out):
    machine = Fake(large=10.0, small=10.0)
    stages = [stage("large", *[0] * 40, share=3.0), stage("small", *[0] * 2, *[1] * 2, share=1.0)]
    run(machine, out, stages, 200.0 + WRITING)
    assert machine.ran[:15] == [f"large/0-{n}" for n in range(15)]  # 150 of 200 s
    assert [name.partition("/")[0] for name in machine.ran[15:]] == ["small"] * 4 + ["large"]  # the rest of the time
    machine = Fake(large=10.0, small=10.0)
    without = Schedule._share
    try:
        Schedule._share = lambda self, stage, remaining: float("inf")
        run(machine, EvidenceSettings(out.out.parent / "other", None, True), stages, 200.0 + WRITING)
    finally:
        Schedule._share = without
    assert "small" not in {name.partition("/")[0] for name in machine.ran}  # what shares protect from


def test_a_case_that_cannot_end_in_time_is_not_started(out):
    machine = Fake(slow=30.0)
    results = run(machine, out, [stage("slow", 0, 0, 0, 0, 0)], 100.0 + WRITING)
    assert len(machine.ran) == 3 and machine.now == 90.0  # of the fourth it is known that 10 s are too few
    assert left(results["slow"]) == dict.fromkeys(("0-3", "0-4"), "the budget was over")
    assert results["slow"]["status"] == "incomplete" and runner.good(list(results.values()), False)
    machine = Fake()
    run(machine, EvidenceSettings(out.out.parent / "short", None, True), [stage("slow", 0)], START + 2.0)
    assert machine.ran == []  # nothing is known of it, and its process needs longer than that to start


def test_what_the_budget_has_cut_off_is_run_again_if_there_is_more_time(out):
    machine = Fake(slow=60.0)
    results = run(machine, out, [stage("slow", 0)], 40.0 + WRITING)
    assert machine.ran == ["slow/0-0"] and machine.now == 40.0 and results["slow"]["status"] == "not run"
    assert left(results["slow"]) == {"0-0": "the budget was over while it ran"}
    run(machine, out, [stage("slow", 0)], 30.0 + WRITING)
    assert len(machine.ran) == 1  # 30 s are known to be too few
    assert run(machine, out, [stage("slow", 0)], 80.0 + WRITING)["slow"]["status"] == "ok"


def test_three_commands_do_what_one_would(out, tmp_path):
    stages = [stage("ready", FIRST), stage("right", *[0] * 4, *[1] * 9), stage("fast", *[0] * 4, *[2] * 9)]
    whole = run(Fake(), EvidenceSettings(tmp_path / "whole", None, True), stages, 10_000.0)
    machine, said = Fake(), []
    for _ in range(3):
        result = run(machine, out, stages, 100.0 + WRITING, said.append)
    assert sorted(machine.ran) == sorted(set(machine.ran)) and len(machine.ran) == 27
    assert {n: r["status"] for n, r in result.items()} == {n: r["status"] for n, r in whole.items()}
    assert [text for text in said if text.startswith("goes on")] == [
        "goes on with 10 cases of an earlier run", "goes on with 20 cases of an earlier run"]  # fmt: skip


@pytest.mark.parametrize(
    "bad, gone, stay",
    [(TWO, {"first_streams", "streams", "device_time"}, {"processes", "faults", "peers"}),
     (SLICE, {"processes", "peers"}, {"streams", "device_time", "faults"}),
     (KILL, {"faults"}, {"streams", "processes", "host_path"}),
     ("first_streams/graph", {"device_time"}, {"streams", "peers"})],
)  # fmt: skip
@pytest.mark.parametrize("needs", [True, False])
def test_what_fails_first_leaves_out_what_depends_on_it(out, monkeypatch, bad, gone, stay, needs):
    if not needs:
        monkeypatch.setattr(Schedule, "leave_dependents", lambda *how: None)
    machine = Fake({bad: "failed"})
    results = run(machine, out, STAGES, 1e6)
    whose, _, key = bad.partition("/")
    for name in gone:
        reasons = set(left(results[name]).values())
        assert bool(reasons) == needs and all(text.startswith(f"{bad} is needed, which was failed") for text in reasons)
        if name != whose:
            assert (results[name]["status"] == "not run") == needs
    assert not any(results[name]["left"] for name in stay) and results[whose]["status"] == "failed"
    assert f"{bad} is needed" in (out.out / "summary.md").read_text() or not needs
    assert not runner.good(list(results.values()), True)


def test_eight_ranks_as_streams_are_left_out_alone(out, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    stages = [stage for stage in STAGES if stage.name.startswith("first") or stage.name in ("streams", "device_time")]
    machine = Fake({"first_streams/8 ranks": "timeout"}, streams=0.01, device_time=0.01)
    results = run(machine, EvidenceSettings(out.out), stages, 1e9)
    for name in ("streams", "device_time"):
        assert results[name]["cases"] and results[name]["left"]
        assert all("/8 ranks" in key for key in left(results[name]))
        assert not any("/8 ranks" in case["key"] for case in results[name]["cases"])
    assert machine.told == [2000.0]  # the time slice, before the first case that may want it


def test_what_a_run_leaves_is_one_archive_and_a_page_that_names_what_is_in_it(out):
    stages = [stage("right", *[0] * 4, *[1] * 9), stage("fast", 0, missing=lambda settings: "no such machine")]
    results = run(Fake(), out, stages, 60.0 + WRITING)
    assert len(list(out.out.iterdir())) <= 8
    text = (out.out / "summary.md").read_text()
    assert "| [right](#right) | incomplete | 6 of 6 | 7 | 60 | right.json | the budget was over |" in text
    keys = [case["key"] for case in results["right"]["left"]]
    assert f"* right, 7 (the budget was over): {'; '.join(keys)}" in text
    assert "| [fast](#fast) | skipped | 0 of 0 | 0 | 0 | fast.json | no such machine |" in text
    with zipfile.ZipFile(out.out / "evidence.zip") as archive:
        assert {"right.json", "fast.json", "summary.md", "journal.jsonl"} <= set(archive.namelist())
        assert archive.read("summary.md").decode() == text
    assert result_schema.read_all(out.out / "evidence.zip") == list(results.values())


def test_a_summary_is_there_before_the_run_has_ended(out):
    class Lost(Fake):
        def run(self, stage, case, left):
            if len(self.ran) == 5:
                assert "| 4 of 4 |" in (out.out / "summary.md").read_text()
            return super().run(stage, case, left)

    run(Lost(), out, [stage("right", *[0] * 6)], 1000.0)


def test_a_stage_whose_process_does_not_start_is_tried_once(out):
    class Broken(Fake):
        def run(self, stage, case, left):
            super().run(stage, case, left)
            return CaseOutcome("crashed", "exit code 1", {}, stage.name != "right")

    machine = Broken()
    results = run(machine, out, [stage("right", 0, 0, 1)], 1000.0)
    assert machine.ran == ["right/0-0"] and results["right"]["status"] == "crashed"
    assert len(results["right"]["left"]) == 3


def test_a_case_whose_variants_take_too_long_is_left_out_with_their_names(out):
    case = "a/0-0"
    world = Fake(ends={case: stage_process.UNCOMPILED})
    results = runner.run([stage("a", 0, 0)], out, lambda text: None, 100.0, world.processes, world.clock)
    assert [(c["key"], c["status"]) for c in results[0]["cases"]] == [("0-1", "ok")]
    assert [left["key"] for left in results[0]["left"]] == ["0-0"] and results[0]["status"] == "incomplete"


@pytest.fixture
def two_workers(monkeypatch):
    """Threads in place of processes; a job whose name is `slow` ends when the test says so."""
    order, release = [], threading.Event()

    def compiled(job):
        order.append(job[0])
        return "" if job[0] != "slow" or release.wait(30) else "late"

    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(compiling, "_workers", lambda: pool)
        monkeypatch.setattr(compiling, "compile_one", compiled)
        yield order
        release.set()


def job(name, world_size=2, **more):
    return name, {"WORLD_SIZE": world_size, "ELEMENT": "float32", "OP": "sum", **more}, 32, True, 90


def test_what_takes_longest_is_compiled_first(two_workers):
    jobs = [job("one_shot"), job("two_shot"), job("one_shot8", 8), job("one_shot_ll128", 8, WIDE=True)]
    compiling.all_of([*jobs, job("two_shot_ll128", 8, WIDE=True)], in_this_process=False)
    assert two_workers[:2] == ["two_shot_ll128", "one_shot_ll128"] and two_workers[-1] == "one_shot"


def test_compiling_ends_with_its_budget_and_names_what_is_missing(two_workers):
    jobs = [job("slow", 8), job("slow", 8, WIDE=True), *(job(f"quick{n}") for n in range(4))]
    with pytest.raises(compiling.Uncompiled, match=r"6 of 6 variants .* within 0 s: slow float32 sum of 8 ranks, slow"):
        compiling.all_of(jobs, in_this_process=False, seconds=0.1)
    case = StageCase("a", lambda: {}, limit=100.0)
    limits = [round(stage_process.compiling_limit(case, left)) for left in (60, 400, 1e9, math.inf)]
    assert limits == [30, 300, 600, 600]
