"""`tricomm.check` of small kernels: mistakes that it must report, and right kernels that it must pass."""

import gc
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import tricomm
from tests.explorer import small_kernels as k
from tricomm.errors import InvalidArgument
from tricomm.explorer.report.findings import KINDS
from tricomm.kernels import wide_words

pytestmark = pytest.mark.usefixtures("unshrunk")
HERE = Path(k.__file__).name


def line(text: str, after: str) -> str:
    """file:line of the line of `small_kernels` with `text`, in the kernel called `after`."""
    lines = Path(k.__file__).read_text().splitlines()
    start = next(n for n, result in enumerate(lines) if result.startswith(f"def {after}("))
    return f"{HERE}:{next(n for n in range(start, len(lines)) if text in lines[n]) + 1}"


def kinds(report) -> set[str]:
    results = {f.kind for f in report.findings}
    assert results <= set(KINDS)
    return results


def places(finding) -> set[str]:
    return {Path(w).name for w in finding.where}


def words(comm, count=16):
    memory = comm.symmetric((count,), torch.int64)
    memory.local.zero_()
    comm.barrier()
    return memory


def two_writers(comm):
    comm.launch(k.two_writers, 1, words(comm).peers, comm.rank, WORLD_SIZE=comm.world_size)


def test_the_garbage_collector_leaves_older_objects_alone_during_a_campaign():
    frozen = []

    def fn(comm):
        frozen.append(gc.get_freeze_count())
        comm.barrier()

    gc.unfreeze()  # of `conftest.py`
    try:
        tricomm.check(fn, 1, schedules=1)
        assert frozen[0] > 0 and gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_a_write_after_write_names_both_lines_and_ranks_and_the_missing_order():
    report = tricomm.check(two_writers, 2, schedules=5)
    (finding,) = report.findings
    assert not report.ok and finding.kind == "race" and set(finding.ranks) == {0, 1}
    assert places(finding) == {line("tl.store", "two_writers")} and len(finding.where) == 2
    assert "write-after-write" in finding.text and "block 0" in finding.text and "no flag" in finding.advice
    assert finding.seed == 0 and report.ran == 1


def test_atomics_of_different_sizes():
    def fn(comm):
        wide = words(comm)
        narrow = wide.peers[0].view(torch.int32)
        comm.launch(k.sizes, 1, wide.peers[0], narrow, comm.rank)

    (finding,) = tricomm.check(fn, 2, schedules=5).findings
    assert finding.kind == "race" and "different sizes (8 and 4 bytes)" in finding.text or "(4 and 8" in finding.text
    assert places(finding) == {line("wide, 1", "sizes"), line("narrow, 1", "sizes")}


def test_a_scope_that_does_not_reach_the_other_rank():
    def fn(comm):
        comm.launch(k.narrow_scope, 1, words(comm).peers, comm.rank, WORLD_SIZE=comm.world_size)

    report = tricomm.check(fn, 2, schedules=5)
    assert kinds(report) == {"scope"} and "scope='sys'" in report.findings[0].advice


def test_atomics_of_one_size_and_a_wide_scope_may_meet():
    def fn(comm):
        out = torch.full((1,), -1)
        comm.launch(k.wide_scope, 1, words(comm).peers, out, WORLD_SIZE=comm.world_size)
        comm.barrier()

    assert tricomm.check(fn, 3, schedules=12).ok


def test_an_atomic_against_a_plain_access():
    def fn(comm):
        comm.launch(
            k.atomic_and_plain, 1, words(comm).peers, torch.zeros(1, dtype=torch.int64), comm.rank, WORLD_SIZE=2
        )

    (finding,) = tricomm.check(fn, 2, schedules=5).findings
    assert finding.kind == "race" and "an atomic or volatile access against a plain one" in finding.text


# Before Triton 3.9 threads that hold the same word all store it, even late.
@pytest.mark.parametrize("compiled", [None, "sm_90"] if wide_words.why_not(90) is None else [None])
def test_a_reader_of_the_zeros_may_meet_the_same_flag_again(compiled):
    """The rule for the slots of messages is not one for users' LL words."""

    def fn(comm):
        out = torch.full((128,), -1, dtype=torch.int64)
        peers = comm.symmetric((160,), torch.int64).peers
        comm.launch(k.flag_again, 1, peers, out, comm.rank, PTX=compiled is not None)
        assert comm.rank == 0 or torch.equal(out[::2], torch.arange(64) + 20)

    report = tricomm.check(fn, 2, schedules=5, compiled=compiled, identical=False)
    assert report.ok, report


@pytest.mark.parametrize(
    ("first", "kind", "words_of_first"),
    [
        ("", None, ""),
        ("plain store", "race", "tl.store(peers[1], 1)"),
        ("plain load", "race", "tl.load(peers[1])"),
        ("narrow scope", "scope", 'tl.atomic_add(peers[1], 1, sem="relaxed", scope="gpu")'),
        ("look of narrow scope", "scope", 'tl.atomic_add(peers[1], 0, sem="relaxed", scope="gpu")'),
        ("half of it", "race", "tl.atomic_xchg(peers[1].to"),
    ],
)
def test_an_atomic_hides_no_race_with_an_earlier_access(first, kind, words_of_first):
    def fn(comm):
        memory, out = words(comm), torch.zeros(1, dtype=torch.int64)
        comm.launch(k.behind_an_atomic, 1, memory.peers, out, comm.rank, FIRST=first)

    result = tricomm.check(fn, 2, schedules=3).findings
    assert [f.kind for f in result] == [kind] * bool(first)
    if first:
        expected = [line(text, "behind_an_atomic") for text in (words_of_first, "# the other rank's")]
        assert [Path(w).name for w in result[0].where] == expected


@pytest.mark.parametrize("written", [True, False])
def test_memory_that_was_never_written(written):
    def fn(comm):
        memory = comm.symmetric((1,), torch.int64)
        if written:
            memory.local.zero_()
        comm.launch(k.reads_unwritten, 1, memory.local, torch.zeros(1, dtype=torch.int64))

    assert kinds(tricomm.check(fn, 2, schedules=3)) == (set() if written else {"uninitialised"})


@pytest.mark.parametrize("past", [0, 1, -17])
def test_accesses_out_of_bounds(past):
    def fn(comm):
        memory = words(comm)
        comm.launch(k.outside, 1, memory.local, torch.zeros(16, dtype=torch.int64), past, BLOCK=16)

    report = tricomm.check(fn, 2, schedules=3)
    assert kinds(report) == ({"out_of_bounds"} if past else set())
    if past:
        finding = report.findings[0]
        assert places(finding) == {line("tl.store", "outside")}
        assert ("0 bytes past the end" if past > 0 else "before") in finding.text


@pytest.mark.parametrize("posted", [5, 6, None])
def test_a_deadlock_names_rank_block_address_expected_and_found(posted):
    def fn(comm):
        memory = words(comm)
        if comm.rank == 0:
            comm.launch(k.waits, 1, memory.local, 5)
        elif posted is not None:
            comm.launch(k.posts, 1, memory.peers[0], posted)

    report = tricomm.check(fn, 2, schedules=4)
    if posted == 5:
        assert report.ok
        return
    finding = report.findings[0]
    assert finding.kind == "deadlock" and finding.ranks == (0,) and places(finding) == {line("while", "waits")}
    (waiter,) = finding.accesses
    assert (waiter["rank"], waiter["block"], waiter["expected"], waiter["found"]) == (0, 0, 5, posted or 0)
    assert hex(waiter["address"]) in finding.text and "rank 0's symmetric memory 0" in finding.text


def test_a_call_that_one_rank_does_not_make_is_a_deadlock():
    def fn(comm):
        if comm.rank != 1:
            comm.all_reduce(torch.ones(3))

    (finding,) = tricomm.check(fn, 3, schedules=3).findings
    assert finding.kind == "deadlock" and set(finding.ranks) == {0, 2} and "rank 1 has returned" in finding.text


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)])
def test_the_lanes_of_a_block(before, after):
    def fn(comm):
        memory, out = words(comm), torch.full((8,), -1)
        comm.launch(k.lane_release, 1, memory.peers, out, comm.rank, BEFORE=before, AFTER=after)

    report = tricomm.check(fn, 2, schedules=6)
    if before and after:
        assert report.ok
        return
    (finding,) = report.findings
    where = "before the release" if not before else "after the acquire"
    assert finding.kind == "race" and f"put tl.debug_barrier() {where}" in finding.advice


@pytest.mark.parametrize("kernel", [k.trusts_the_header, k.trusts_one_word], ids=lambda f: f.fn.__name__)
@pytest.mark.parametrize("faults", [(), ("delay",)], ids=str)
def test_late_stores_find_a_bug_that_no_interleaving_shows(kernel, faults, unshrunk):
    def fn(comm):
        memory, out = words(comm), torch.full((2,), -1)
        comm.launch(kernel, 1, memory.peers, out, comm.rank)
        comm.barrier()
        comm.launch(k.takes, 1, memory.local, torch.zeros(16, dtype=torch.int64))
        assert comm.rank == 0 or out.tolist() == [41, 42]

    report = tricomm.check(fn, 2, schedules=400 if faults else 25, faults=faults, seed=5)  # a seed that shows it soon
    assert kinds(report) == ({"wrong_result"} if faults else set())


def test_blocks_of_one_launch_race_in_private_memory():
    def fn(comm, kernel):
        comm.launch(kernel, 3, torch.zeros(24, dtype=torch.int32), BLOCK=8)

    (finding,) = tricomm.check(lambda comm: fn(comm, k.blocks_race), 1, schedules=3).findings
    assert finding.kind == "race" and finding.ranks == (0, 0)
    assert tricomm.check(lambda comm: fn(comm, k.blocks_apart), 1, schedules=3).ok


@pytest.mark.parametrize("identical", [None, True, False])
def test_ranks_that_do_not_hold_the_same_bits(identical):
    def fn(comm):
        memory, out = comm.symmetric((64,), torch.float32), torch.zeros(64)
        memory.local.copy_(torch.randn(64))
        comm.barrier()
        comm.launch(k.sum_from_own_rank, 1, memory.peers, out, comm.rank, WORLD_SIZE=comm.world_size, BLOCK=64)
        comm.barrier()
        return out

    assert kinds(tricomm.check(fn, 3, schedules=2, identical=identical)) == (
        set() if identical is False else {"rank_mismatch"}
    )


def test_results_that_differ_by_rank_are_a_mismatch_only_if_they_should_be_identical():
    assert tricomm.check(lambda comm: torch.full((3,), float(comm.rank)), 3, schedules=2).ok
    assert kinds(tricomm.check(lambda comm: torch.full((3,), float(comm.rank)), 3, schedules=2, identical=True)) == {
        "rank_mismatch"
    }


def test_a_result_that_depends_on_the_schedule():
    def fn(comm):
        out = torch.full((4,), -1)
        comm.launch(k.tickets, 1, words(comm).peers, out, WORLD_SIZE=comm.world_size, TIMES=4)
        comm.barrier()
        return out

    (finding,) = tricomm.check(fn, 2, schedules=20).findings
    assert finding.kind == "wrong_result" and "depends on the schedule" in finding.text


def test_an_assertion_is_a_wrong_result_and_any_other_error_an_exception():
    def wrong(comm):
        assert comm.rank == 0, "not what I expected"

    def broken(comm):
        if comm.rank == 1:
            raise ValueError("broken")

    for fn, kind in ((wrong, "wrong_result"), (broken, "exception")):
        (finding,) = tricomm.check(fn, 2, schedules=2).findings
        code = fn.__code__
        assert finding.kind == kind and finding.ranks == (1,)
        assert finding.where[0].startswith(f"{code.co_filename}:")
        assert code.co_firstlineno < int(finding.where[0].rpartition(":")[2]) <= code.co_firstlineno + 2


def test_different_calls_on_different_ranks_are_named():
    (finding,) = tricomm.check(lambda comm: comm.all_reduce(torch.ones(3 + comm.rank)), 2, schedules=3).findings
    assert finding.kind == "exception" and "CollectiveMismatch" in finding.text
    assert "rank 0 all_reduce" in finding.text and "rank 1 all_reduce" in finding.text


@pytest.mark.parametrize("peer", [0, 1])
def test_host_code_that_touches_shared_memory_unordered(peer):
    """Rank 1 clears `peer`'s memory while rank 0's kernel may still read its own."""

    def fn(comm):
        memory = words(comm)
        if comm.rank == 0:
            comm.launch(k.reads_unwritten, 1, memory.local, torch.zeros(1, dtype=torch.int64))
        else:
            memory.peers[peer].zero_()

    report = tricomm.check(fn, 2, schedules=4)
    assert kinds(report) == ({"race"} if peer == 0 else set())
    if peer == 0:
        assert any("host code" in f.text for f in report.findings)


LINKED = """
import torch, triton, tricomm
assert "/linked/" in triton.__file__, triton.__file__
report = tricomm.check(lambda comm: comm.all_reduce(torch.ones(9), algorithm="one_shot", protocol="ll"), 2, schedules=1)
assert report.ok, report
"""


def test_an_environment_through_a_symbolic_link(tmp_path):
    linked, root = tmp_path / "linked", Path(tricomm.__file__).parents[1]
    linked.symlink_to(sysconfig.get_path("purelib"))
    environment = os.environ | {"PYTHONPATH": f"{linked}{os.pathsep}{root}"}
    done = subprocess.run([sys.executable, "-c", LINKED], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def generator(comm):
    yield comm


async def coroutine(comm):
    return comm


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"strategy": "dfs"}, "strategy"),
        ({"schedules": 0}, "schedules=0"),
        ({"schedules": None}, "never ends"),
        ({"schedules": True}, "schedules=True"),
        ({"preemptions": -1}, "preemptions"),
        ({"seed": -1}, "seed"),
        ({"faults": "delay"}, "faults"),
        ({"faults": ["fire"]}, "faults"),
        ({"world_size": 17}, "world_size=17"),
        ({"world_size": 0}, "world_size=0"),
        ({"fn": 3}, "3: a function of one communicator"),
        ({"fn": lambda comm, more: None}, "cannot be called with one communicator"),
        ({"options": {}}, "options"),
        ({"fn": generator}, "generator or a coroutine"),
        ({"fn": coroutine}, "generator or a coroutine"),
        ({"fn": k.waits}, "function of one communicator that launches kernels is needed"),
        ({"residency": 0}, "residency=0"),
        ({"residency": "x"}, "residency='x'"),
        ({"faults": None}, "faults=None"),
        ({"faults": 7}, "faults=7"),
        ({"seed": 1 << 70}, "seed="),
    ],
    ids=lambda value: re.sub(" at 0x.*", "", str(value)),
)
def test_bad_arguments_are_refused_by_name(arguments, text):
    with pytest.raises(InvalidArgument, match=text):
        tricomm.check(**{"fn": lambda comm: None, "world_size": 2, **arguments})
