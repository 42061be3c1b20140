"""Whether a race shows by timing alone or by reordering, or is formal; and remedies for inline PTX."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

import tricomm
from tests.explorer.standins import all_reduces
from tests.explorer.test_check import two_writers, words
from tricomm.explorer import subjects
from tricomm.explorer.report import sarif
from tricomm.explorer.report.findings import CACHED, FORMAL, REAL, REORDERED
from tricomm.explorer.report.report import Report
from tricomm.explorer.schedule import host_watchdog
from tricomm.explorer.schedule.strategies import RandomWalk as walk


@triton.jit
def hand_over(words, out, rank, SEM: tl.constexpr, SCOPE: tl.constexpr):
    """Rank 0 stores, and rank 1 loads after a flag."""
    if rank == 0:
        tl.store(words[1] + 2, 7)
        tl.debug_barrier()
        tl.atomic_xchg(words[1], 1, sem=SEM, scope=SCOPE)
    else:
        while tl.atomic_add(words[1], 0, sem="acquire", scope=SCOPE) != 1:
            pass
        tl.debug_barrier()
        tl.store(out, tl.load(words[1] + 2))


@triton.jit
def turn(words, SIZE: tl.constexpr):
    """Each thread reads what another one has stored."""
    at = tl.arange(0, SIZE)
    tl.store(words + at, at.to(tl.int64))
    tl.store(words + SIZE + at, tl.load(words + SIZE - 1 - at))


@triton.jit
def after_a_flag(words, out, rank, FLAG: tl.constexpr):
    """Rank 1 loads from rank 0, with FLAG after a relaxed flag of rank 0's kernel."""
    if rank == 0:
        tl.atomic_xchg(words[1], 1, sem="relaxed", scope="sys")
    else:
        if FLAG:
            while tl.atomic_add(words[1], 0, sem="relaxed", scope="sys") == 0:
                pass
        tl.debug_barrier()
        tl.store(out, tl.load(words[0] + 2))


def filled(flag):
    """Host code of rank 0 writes what a kernel of rank 1 loads."""

    def fn(comm):
        memory, out = words(comm), torch.zeros(1, dtype=torch.int64)
        if comm.rank == 0:
            memory.local[2:].fill_(7)
        comm.launch(after_a_flag, 1, memory.peers, out, comm.rank, FLAG=flag)

    return fn


@triton.jit
def read(theirs, out):
    tl.store(out, tl.load(theirs))


def fills_and_reads():
    """A program without a barrier between a rank's write and the other one's kernel."""
    memory = symm_mem.empty(4, dtype=torch.int64, device="cuda")
    handle = symm_mem.rendezvous(memory, dist.group.WORLD)
    memory.fill_(dist.get_rank())
    read[(1,)](
        handle.get_buffer(1 - dist.get_rank(), (4,), torch.int64), torch.zeros(1, dtype=torch.int64, device="cuda")
    )


def handed(sem, scope):
    def fn(comm):
        memory, out = words(comm), torch.zeros(1, dtype=torch.int64)
        comm.launch(hand_over, 1, memory.peers, out, comm.rank, SEM=sem, SCOPE=scope)

    return fn


def effect(fn, compiled=None, schedules=4):
    report = tricomm.check(fn, 2, schedules=schedules, compiled=compiled)
    finding = next(f for f in report.findings if f.kind in ("race", "scope"))
    assert bool(finding.effect) == (f"   {finding.effect}\n" in str(report))
    return finding.effect


@pytest.mark.parametrize("compiled", [None, "sm_90"])
def test_of_a_race_without_a_flag_either_access_comes_first(compiled):
    assert effect(two_writers, compiled) == REAL


@pytest.mark.parametrize(("sem", "scope"), [("relaxed", "sys"), ("release", "gpu")])
@pytest.mark.parametrize("compiled", [None, "sm_90"])
def test_a_flag_that_is_too_weak_keeps_the_order_in_time(compiled, sem, scope):
    """With scope gpu the two accesses to the flag are a finding as well, which says nothing about an order."""
    report = tricomm.check(handed(sem, scope), 2, schedules=4, compiled=compiled)
    effects = [f.effect for f in report.findings]
    assert REORDERED in effects and set(effects) <= {REORDERED, ""}, report


@pytest.mark.parametrize("compiled", [None, "sm_90"])
def test_host_code_may_write_after_the_kernel_of_another_rank_has_read(compiled):
    assert effect(filled(False), compiled) == REAL
    assert effect(fills_and_reads, compiled or "none") == REAL


def test_without_walks_in_which_kernels_run_before_host_code_the_other_order_is_hidden(monkeypatch):
    monkeypatch.setattr("tricomm.explorer.campaign.RandomWalk", lambda seed, keep=0.0, hosts_first=True: walk(seed))
    assert effect(fills_and_reads) == ""


def test_a_relaxed_flag_after_the_end_of_the_writer_is_a_formal_race():
    report = tricomm.check(filled(True), 2, schedules=4, compiled="sm_90")
    (finding,) = [f for f in report.findings if f.kind == "race"]
    assert finding.effect == CACHED and "is relaxed: make it sem='acquire'" in finding.advice, report


@pytest.mark.parametrize(("size", "formal"), [(32, True), (64, False)])
def test_two_lanes_of_one_warp_are_a_formal_race(size, formal):
    def fn(comm):
        comm.launch(turn, 1, words(comm, 128).local, SIZE=size, num_warps=size // 32)

    report = tricomm.check(fn, 1, schedules=4, compiled="sm_90")
    found = [f.effect == FORMAL for f in report.findings if f.kind == "race"]
    assert found and any(found) is formal, report
    results = sarif.log((finding, None) for finding in report.findings)["runs"][0]["results"]
    assert [result["level"] == "warning" for result in results if result["ruleId"] == "race"] == found


@triton.jit
def wait(words, rank):
    """Nobody sets a flag."""
    while tl.atomic_add(words, 0, sem="acquire", scope="sys") != 1:
        pass


@pytest.mark.parametrize("compiled", [None, "sm_90"])
def test_two_waiters_of_a_deadlock_are_no_race(compiled):
    def fn(comm):
        comm.launch(wait, 1, words(comm).local, comm.rank)

    (finding,) = tricomm.check(fn, 2, schedules=2, compiled=compiled).findings
    assert (finding.kind, len(finding.accesses) >= 2, finding.effect) == ("deadlock", True, "")


def test_without_more_schedules_no_race_is_said_to_be_real(monkeypatch):
    monkeypatch.setattr("tricomm.explorer.campaign._TRIES", 0)
    assert effect(two_writers) == ""


def test_a_budget_that_ends_meanwhile_keeps_the_finding(monkeypatch):
    def late(self, report):
        raise host_watchdog.OutOfTime("before its first step")

    monkeypatch.setattr("tricomm.explorer.campaign.Campaign._tell_effects", late)
    assert effect(two_writers) == ""


def test_an_effect_survives_its_file(tmp_path):
    report = tricomm.check(two_writers, 2, schedules=1)
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").findings[0].effect == REAL
    text = (tmp_path / "report.json").read_text()
    (tmp_path / "older.json").write_text(text.replace(f',\n   "effect": "{REAL}"', ""))
    assert Report.load(tmp_path / "older.json").findings[0].effect == ""


@pytest.mark.parametrize(
    ("mended", "mistake", "remedy"),
    [
        (
            '"acquire" if BEFORE',
            '"relaxed" if BEFORE',
            r"the load at mine.py:({receive}) is relaxed: make it .*\(\.acquire\)",
        ),
        (
            "atom.global.{SEM}.sys.cas.b32 %before, [$1], 0",
            "atom.global.{SEM}.gpu.cas.b32 %before, [$1], 0",
            r"say scope='sys' \(\.sys\)",
        ),
    ],
    ids=["acquire", "scope"],
)
def test_the_remedy_names_the_line_of_inline_ptx_and_its_words(tmp_path, mended, mistake, remedy):
    """The host fills the memory, and an earlier launch's end makes that visible: the wait is to blame."""
    text = Path(all_reduces.__file__).read_text()
    (tmp_path / "mine.py").write_text(text.replace(mended, mistake))
    start = text.splitlines().index("def receive(word, SEM: tl.constexpr):") + 1
    receive = "|".join(map(str, range(start, start + 15)))
    name = f"{tmp_path / 'mine.py'}:one_shot"
    program = subjects.with_arguments(subjects.from_file(name), "float(rank + 1), count=70", 2, name)
    report = tricomm.check(program, 2, schedules=4, keep_going=True)
    assert any(re.search(remedy.replace("{receive}", receive), f.advice) for f in report.findings), report
