"""Many blocks, bounded polls, endless kernels and invalid arguments: the findings and errors."""

import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tricomm.errors import InvalidArgument
from tricomm.explorer import campaign
from tricomm.explorer.schedule import contention, scheduler
from tricomm.options import Tuning


@triton.jit
def pass_on(memory, rank, out, WORLD: tl.constexpr, ORDERED: tl.constexpr):
    """Block b of each rank tells block b of the next one a number."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    for other in tl.static_range(WORLD):
        if other == (rank + 1) % WORLD:
            tl.store(memory[other] + block, 100 * rank + block)
            tl.debug_barrier()
            tl.atomic_xchg(memory[other] + blocks + block, 1, sem="release" if ORDERED else "relaxed", scope="sys")
    for other in tl.static_range(WORLD):
        if other == rank:
            while tl.atomic_add(memory[other] + blocks + block, 0, sem="acquire", scope="sys") != 1:
                pass
            tl.debug_barrier()
            tl.store(out + block, tl.load(memory[other] + block))


def passing_on(blocks, ordered=True):
    def fn(comm):
        memory, out = comm.symmetric((2 * blocks,), torch.int32), torch.full((blocks,), -1, dtype=torch.int32)
        comm.launch(pass_on, blocks, memory.peers, comm.rank, out, WORLD=comm.world_size, ORDERED=ordered)
        before = (comm.rank - 1) % comm.world_size
        assert torch.equal(out, 100 * before + torch.arange(blocks, dtype=torch.int32))
        return out

    return fn


@pytest.mark.parametrize(("world_size", "blocks"), [(2, 4), (1, 9), (2, 40), (3, 7)])
def test_launches_of_many_blocks(world_size, blocks):
    report = tricomm.check(passing_on(blocks), world_size, schedules=4)
    assert report.ok, report
    broken = tricomm.check(passing_on(blocks, ordered=False), world_size, schedules=4)
    assert [f.kind for f in broken.findings] == ["race"] * (world_size > 1)


def test_room_for_more_blocks_is_made_while_others_run():
    def fn(comm):
        for blocks in (1, 2, 5, 11):
            passing_on(blocks)(comm)

    assert tricomm.check(fn, 2, schedules=6).ok


def test_blocks_beyond_64_are_not_taken_for_another_ranks():
    tasks = [type("T", (), {"key": key}) for key in ("r0b64", "r1b0")]
    place = type(
        "P", (), {"region": type("R", (), {"name": "x", "nbytes": 8}), "offsets": torch.zeros(1).long().numpy()}
    )
    known = contention.Contention(2)
    assert not known.contested(tasks[0], [place]) and known.contested(tasks[1], [place])


@triton.jit
def look_a_few_times(memory, rank, out, LOOKS: tl.constexpr):
    """Rank 1 reads rank 0's flag a fixed number of times and may never see it."""
    if rank == 0:
        tl.atomic_xchg(memory[1], 1, sem="release", scope="sys")
    else:
        seen = 0
        for _ in range(LOOKS):
            seen += tl.atomic_add(memory[1], 0, sem="acquire", scope="sys")
        tl.store(out, seen)


def test_a_bounded_poll_may_fail():
    def fn(comm):
        memory, out = comm.symmetric((1,), torch.int32), torch.full((1,), -1, dtype=torch.int32)
        comm.launch(look_a_few_times, 1, memory.peers, comm.rank, out, LOOKS=4)
        assert comm.rank == 0 or out.item() > 0, "gave up"

    report = tricomm.check(fn, 2, schedules=40)
    assert report.findings and report.findings[0].kind == "wrong_result" and "gave up" in report.findings[0].text
    again = campaign.replay(report, fn)
    assert [f.key for f in again[0]] == [report.findings[0].key]


@triton.jit
def scale(factor, out, rounds):
    """Loads one word of symmetric memory again in every round."""
    total = 0
    for n in range(rounds):
        total += n * tl.load(factor)
    tl.store(out, total)


@triton.jit
def scale_and_look(factor, flag, out, rounds):
    total = 0
    for n in range(rounds):
        total += n * tl.load(factor)
    for _ in range(5):
        total += tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.store(out, total)


@triton.jit
def wait_by_plain_loads(memory):
    while tl.load(memory) == 0:
        pass


def test_a_loop_that_loads_one_word_again_and_again_is_no_wait(monkeypatch, unshrunk):
    def fn(comm):
        memory, out = comm.symmetric((1,), torch.int32), torch.full((1,), -1, dtype=torch.int32)
        memory.local.fill_(2 + comm.rank)
        comm.launch(scale, 1, memory.local, out, 300)
        assert out.item() == 299 * 300 // 2 * (2 + comm.rank)

    assert tricomm.check(fn, 2, schedules=2).ok
    monkeypatch.setattr(scheduler, "_WEAK_STEPS", 0)
    (finding,) = tricomm.check(fn, 2, schedules=2).findings
    assert finding.kind == "deadlock"


def test_rounds_of_one_loop_do_not_count_for_the_next():
    def fn(comm):
        memory, out = comm.symmetric((2,), torch.int32), torch.full((1,), -1, dtype=torch.int32)
        memory.local.fill_(1)
        comm.launch(scale_and_look, 1, memory.local, memory.local[1:], out, 100)
        assert out.item() == 99 * 100 // 2 + 5

    assert tricomm.check(fn, 2, schedules=1).ok


def test_many_blocks_that_wait_by_plain_loads_are_named_soon(unshrunk):
    def fn(comm):
        comm.launch(wait_by_plain_loads, 8, comm.symmetric((1,), torch.int32).local.zero_())

    report = tricomm.check(fn, 3, schedules=1)
    assert report.findings[0].kind == "deadlock" and "block 7 of wait_by_plain_loads waits at" in str(report)
    assert report.steps < 1.5 * scheduler._WEAK_STEPS


def test_blocks_that_have_no_place_are_named_once_for_a_rank_and_without_a_line():
    def fn(comm):
        comm.all_reduce(torch.ones(64), algorithm="one_shot", protocol="simple")

    options = tricomm.Options(_tuning=Tuning(blocks=4, tile=16))
    (finding,) = tricomm.check(fn, 2, schedules=4, residency=1, options=options).findings
    assert finding.kind == "deadlock" and "?" not in str(finding).partition(": ")[0]
    assert "waits for a place on the device" in finding.text


@triton.jit
def endless(memory):
    while tl.atomic_add(memory, 1, sem="relaxed", scope="sys") >= 0:
        pass


def test_a_kernel_without_an_end_is_named(monkeypatch, unshrunk):
    monkeypatch.setattr(campaign, "_MOST_STEPS", 300)

    def body(comm):
        memory = comm.symmetric((1,), torch.int32)
        if comm.rank == 1:
            comm.launch(endless, 1, memory.local)

    (finding,) = tricomm.check(body, 2, schedules=1).findings
    assert (
        finding.kind == "deadlock"
        and finding.ranks == (1,)
        and "rank 1, block 0 of endless runs on and on" in str(finding)
    )


@triton.jit
def spin(memory, rank):
    while tl.atomic_add(memory[1], 0, sem="acquire", scope="sys") != 1:
        pass


@pytest.mark.parametrize("error", [AssertionError, ValueError, SystemExit])
def test_an_exception_of_a_rank_is_reported_before_the_waits_that_it_causes(error):
    def fn(comm):
        memory = comm.symmetric((1,), torch.int32)
        if comm.rank == 0:
            raise error("the real bug")
        comm.launch(spin, 1, memory.peers, comm.rank)

    (finding,) = tricomm.check(fn, 2, schedules=1).findings
    assert finding.kind == ("wrong_result" if error is AssertionError else "exception")
    assert finding.ranks == (0,) and "the real bug" in finding.text


@pytest.mark.parametrize("seed", ["x", 1 << 70, -1, True])
def test_invalid_seeds(seed):
    with pytest.raises(InvalidArgument, match="seed="):
        tricomm.simulate(lambda comm: None, 2, seed=seed)


def test_a_result_that_is_no_plain_tensor_is_ignored():
    assert tricomm.check(lambda comm: (torch.eye(2).to_sparse(), comm.rank), 2, schedules=2).ok


@triton.jit
def wait_and_write(locks, out_ptr, rank, EXCHANGES: tl.constexpr, COUNTS: tl.constexpr):
    """Rank 0 opens a lock for which rank 1 waits in a loop that writes in each round."""
    if rank == 0:
        tl.atomic_xchg(locks[1], 0, sem="release", scope="sys")
    else:
        held, rounds = 1, 0
        while held == 1:
            if EXCHANGES:
                held = tl.atomic_xchg(locks[1], 1, sem="acquire", scope="sys")
            else:
                held = tl.atomic_add(locks[1], 0, sem="acquire", scope="sys")
                rounds += COUNTS
                tl.store(out_ptr, rounds)


@pytest.mark.parametrize("compiled", [None, "sm_90"])
@pytest.mark.parametrize(
    ("exchanges", "counts", "most"),
    [(False, 0, 1500), (True, 0, 1500), (False, 1, 40_000)],
    ids=["stores the same", "exchanges", "counts"],
)
@pytest.mark.parametrize("strategy", ["random", "pct", "exhaustive"])
def test_a_loop_that_waits_and_writes_leaves_the_others_their_turn(strategy, exchanges, counts, most, compiled):
    def fn(comm):
        lock, out = comm.symmetric((1,), torch.int32), torch.zeros(1, dtype=torch.int32)
        lock.local.fill_(1)
        comm.barrier()
        comm.launch(wait_and_write, 1, lock.peers, out, comm.rank, EXCHANGES=exchanges, COUNTS=counts)
        return lock.local.clone()

    schedules = 6 if compiled is None else 2
    report = tricomm.check(fn, 2, schedules, strategy=strategy, identical=False, compiled=compiled)
    assert report.ok and report.steps < most, report


@triton.jit
def push_unless_stopped(peers, x_ptr, stop, rank, COUNT: tl.constexpr):
    """Stores zeros over zeros, and reads a word before each store."""
    for other in tl.static_range(2):
        if other != rank:
            for first in range(COUNT):
                if tl.load(stop, volatile=True) == 0:
                    tl.store(peers[other] + first, tl.load(x_ptr + first))


@pytest.mark.parametrize("compiled", [None, "sm_90"])
def test_stores_of_equal_values_are_progress_at_new_addresses(compiled):
    def fn(comm):
        box, stop, x = comm.symmetric((40,), torch.int64), comm.symmetric((1,), torch.int64), torch.zeros(40).long()
        comm.launch(push_unless_stopped, 1, box.peers, x, stop.local, comm.rank, COUNT=40, num_warps=1)
        comm.barrier()
        return box.local.clone()

    report = tricomm.check(fn, 2, 3, compiled=compiled)
    assert report.ok, report
