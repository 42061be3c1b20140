"""The mailbox protocol between real processes: epochs, wrap-around, and each protection taken away.

Results of every size and type: tests/core/test_collectives.py.

Each negative control takes one protection out and must see the failure that the protection prevents.
"""

import importlib
import os
import time
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl

from tests import ranks
from tests.explorer.mutation import Edit, loaded
from tests.kernels import arenas
from tests.kernels.arenas import DATA_KERNELS, Block, Rank, poisoned
from tests.marks import odd, some
from tricomm.kernels import layout, primitives
from tricomm.kernels.device import mailbox
from tricomm.kernels.launch import interpreter, triton_adapter
from tricomm.perf.bench import check_data

EVERY = 1 << 30
NAMES = {k.name: k for k in DATA_KERNELS}


@contextmanager
def block(world_size, arena_bytes=128 * 1024):
    made = Block(world_size, arena_bytes)
    try:
        yield made.where
    finally:
        made.close()


def wait_for_all(rank: Rank) -> None:
    """A barrier without a kernel: all tables are written before any rank pushes."""
    rank.control[100] = 1
    end = time.monotonic() + 60
    while any(int(rank.words[(r * rank.stride + rank.plan.nbytes) // 8 + 100]) == 0 for r in range(rank.world_size)):
        if time.monotonic() > end:
            raise TimeoutError("the ranks did not meet")
        time.sleep(0.001)


def right(me: Rank, kernel, count: int, seed: int, **how) -> bool:
    """Make one call of fp32; True if its result is right."""
    facts, root = (kernel.collective, "sum", me.world_size), check_data.root(me.world_size, seed)
    x = check_data.values(*facts, me.rank, seed, count, torch.float32).float()
    keeps = kernel.collective == "broadcast" and me.rank == root  # the result is in the input tensor
    y = x if keeps else poisoned(count * kernel.kind.rows_out(me.world_size), torch.float32)
    me.run(kernel, x, y, root=root, **how)
    exact = check_data.expected(*facts, seed, count, me.rank, torch.float32)
    return not check_data.gets(*facts[::2], me.rank, seed) or check_data.wrong(y, exact) == 0


def around_the_wrap(rank, world_size, tell, where, name, first, calls, without=None):
    """Make `calls` calls from epoch `first` on, in mailboxes full of words of later epochs."""
    if without == "clear":
        interpreter.substitute(mailbox.clear_idle, lambda *args: None)
    me = Rank(rank, where, epoch=first)
    stale = first
    for _ in range(calls // 2 + 1):
        stale = stale + 1 if stale + 1 < layout.EPOCH_LIMIT else 2
    # As a long message left them 2^32 epochs ago: payload 1, with the flag of an epoch that is about to repeat.
    me.arena[me.plan.ll // 8 : me.plan.simple // 8] = (stale << 32 | 1) - (1 << 64 if stale >> 31 else 0)
    wait_for_all(me)
    if rank == 0:  # so slow that the others poll a word long before it arrives
        push = triton_adapter.python(primitives.put_ll)
        interpreter.substitute(primitives.put_ll, lambda *args: (time.sleep(0.01), push(*args)))
    kernel, wrong = NAMES[name], []
    for seed in range(calls):
        count = 90 if seed >= calls // 2 else 5  # the long ones reach words that the short ones have not touched
        if not right(me, kernel, count, seed, blocks=2, tile=8):
            wrong.append((seed, me.epoch))
    return wrong, me.epoch


EDGES = {"2^30": EVERY - 2, "2^31": 2 * EVERY - 2, "3*2^30": 3 * EVERY - 3}
STALE = [(name, edge) for name in NAMES for edge in (EDGES if "all_reduce_one_shot" in name else ["2^31"])]


@pytest.mark.parametrize(("name", "edge"), some(STALE, 12, odd))
def test_stale_words_are_cleared_before_their_epoch_repeats(name, edge):
    first = EDGES[edge]
    with block(2, 64 * 1024) as where:
        results = ranks.run(2, around_the_wrap, where, name, first, 8)
    assert [wrong for wrong, _ in results] == [[], []]
    assert {epoch for _, epoch in results} == {first + 8}


def test_without_the_clearing_a_stale_word_is_taken_for_a_new_one():
    with block(2, 64 * 1024) as where:
        results = ranks.run(2, around_the_wrap, where, "all_reduce_one_shot_ll", EVERY - 2, 8, "clear")
    assert any(wrong for wrong, _ in results)


@triton.jit
def _advance(y_ptr, epoch: tl.int64, N: tl.constexpr):
    for n in range(N):
        tl.store(y_ptr + n, primitives.advance(epoch, n))


def test_epochs_skip_zero_and_keep_alternating_between_the_mailboxes():
    y = torch.full((12,), -1)
    interpreter.interpret(interpreter.programs(_advance, (1,), (y, layout.EPOCH_LIMIT - 5), {"N": 12}))
    epochs = y.tolist()
    assert epochs[:5] == [layout.EPOCH_LIMIT - 5 + n for n in range(5)] and epochs[5:] == list(range(2, 9))
    assert all(a % 2 != b % 2 for a, b in zip(epochs, epochs[1:], strict=False))


def over_the_limit(rank, world_size, tell, where, name):
    """Across 2^32, with calls of several chunks: the epoch skips 0 and 1 and its parity keeps alternating."""
    me = Rank(rank, where, epoch=layout.EPOCH_LIMIT - 3)
    wait_for_all(me)
    kernel, wrong, epochs = NAMES[name], [], []
    for seed, count in enumerate([1, 2500, 5, 2500, 1, 1, 1500]):
        if not right(me, kernel, count, seed, blocks=2):
            wrong.append((seed, count))
        epochs.append(me.epoch)
    return wrong, epochs


@pytest.mark.parametrize("name", some(NAMES, 10, odd))
def test_the_epoch_goes_over_2_to_the_32(name):
    with block(2, 64 * 1024) as where:
        results = ranks.run(2, over_the_limit, where, name)
    assert [wrong for wrong, _ in results] == [[], []]
    assert results[0][1] == results[1][1]
    assert results[0][1][-1] < 100 and 0 not in results[0][1]


def uneven(rank, world_size, tell, where):
    """Two ranks of very different speed, calls of several chunks whose last one leaves blocks without words."""
    me = Rank(rank, where)
    wait_for_all(me)
    kernel, wrong = NAMES["all_reduce_one_shot_ll"], []
    if rank == 1:
        interpreter.substitute(primitives.pause, lambda spins: time.sleep(0.02))
    for seed, count in enumerate([1100, 3, 1100, 2, 1, 1100, 5] * 2):
        if not right(me, kernel, count, seed, blocks=2, tile=64):
            wrong.append((seed, count))
            break
    return wrong


def _give_up_after(me, seconds, plain):
    """A host that sets the abort word when a call takes too long."""
    end = time.monotonic() + seconds

    def pause(spins):
        if time.monotonic() > end:
            me.control[layout.ABORT] = 1
        plain(spins)

    return pause


def test_ranks_of_different_speed_lose_no_word():
    with block(2, 64 * 1024) as where:
        assert ranks.run(2, uneven, where) == [[], []]


def first_calls(rank, world_size, tell, where, without):
    """Rank 1 sleeps; return the number of barriers that rank 0 completes meanwhile."""
    from tricomm.kernels.collectives.barrier import barrier

    if without == "headers":
        interpreter.substitute(primitives.wait_headers, lambda *args: 0)
    me = Rank(rank, where)
    wait_for_all(me)
    began = time.monotonic()
    if rank == 1:
        time.sleep(1.5)
    constexprs = {"WORLD_SIZE": world_size, "BLOCK": 64, "LANES": 16, "PTX": False}
    passed = 0
    for number in range(1, 5):
        arenas.prepare(barrier, (1,), (me.arena, number << 32 | 7), constexprs, torch.device("cpu"))()
        if time.monotonic() - began < 1.2:
            passed += 1
    return passed


def test_headers_make_a_fast_rank_wait():
    with block(2) as where:
        assert ranks.run(2, first_calls, where, None)[0] == 0
    with block(2) as where:
        assert ranks.run(2, first_calls, where, "headers")[0] == 4, "the control: without headers it does not wait"


def different(rank, world_size, tell, where, names, blocks):
    me = Rank(rank, where)
    wait_for_all(me)
    x, y = torch.ones(100 * world_size), poisoned(100 * world_size, torch.float32)
    me.run(NAMES[names[rank]], x, y, fingerprint=1000 + rank, blocks=blocks[rank])
    return me.status, bool(y.isnan().all()), me.epoch


# All kernels start with one comparison: each with different grids, and kernels of one collective with equal ones.
GRIDS = [
    pytest.param(name, blocks, marks=[] if blocks == (1, 2) or "all_gather" in name else [pytest.mark.soak])
    for name in NAMES
    for blocks in ((1, 1), (2, 2), (1, 2))
]


@pytest.mark.parametrize(("first", "blocks"), some(GRIDS, 3), ids=str)
def test_a_wrong_fingerprint_stops_both_ranks_before_any_data_is_used(first, blocks):
    with block(2) as where:
        results = ranks.run(2, different, where, (first, "all_reduce_one_shot_ll"), blocks)
    for rank, (status, untouched, epoch) in enumerate(results):
        assert status & 0xFF == layout.MISMATCH
        assert (status >> 8) & 0xFF == 1 - rank
        assert (status >> 32) & 0xFFFFFFFF == 1000 + (1 - rank)
        assert untouched and epoch == 1


def alone(rank, world_size, tell, where, name):
    me = Rank(rank, where)
    interpreter.substitute(primitives.pause, _give_up_after(me, 0.5, triton_adapter.yield_to_others))
    y = poisoned(100 * world_size, torch.float32)
    began = time.monotonic()
    me.run(NAMES[name], torch.ones(100 * world_size), y, blocks=2)
    return time.monotonic() - began, me.epoch, os.getpid()


@pytest.mark.parametrize("name", some(NAMES, 5))
def test_the_abort_word_ends_every_wait(name):
    with block(2) as where, ranks.start(1, alone, where, name) as started:
        (outcome,) = started.results()
    seconds, epoch, _ = outcome.value
    assert 0.5 <= seconds < 10 and epoch == 1


def overlapping(rank, world_size, tell, where):
    me = Rank(rank, where)
    me.arena[layout.EPOCHS] |= 12345 << 32  # as another launch of this communicator leaves it while it runs
    wait_for_all(me)
    me.run(NAMES["all_reduce_one_shot_ll"], torch.ones(8), poisoned(8, torch.float32), fingerprint=1)
    return me.status


def test_a_launch_that_overlaps_another_one_is_reported():
    with block(2) as where:
        assert ranks.run(2, overlapping, where) == [layout.OVERLAP] * 2


def overlapping_and_alone(rank, world_size, tell, where, status, abort):
    """Another launch has left its number in an epoch word, and no peer ever comes: what the status word says."""
    me = Rank(rank, where)
    me.arena[layout.EPOCHS] |= 12345 << 32
    me.control[layout.STATUS], me.control[layout.ABORT] = status, abort
    interpreter.substitute(primitives.pause, _give_up_after(me, 5.0, triton_adapter.yield_to_others))
    me.run(NAMES["all_reduce_one_shot_ll"], torch.ones(8), poisoned(8, torch.float32), fingerprint=1)
    return me.status


@pytest.mark.parametrize(
    ("status", "abort", "said"),
    [(0, 0, layout.OVERLAP), (layout.MISMATCH, 0, layout.MISMATCH), (0, 1, 0)],
    ids=["at once", "what was reported before stays", "a launch that was told to leave left it"],
)
def test_a_launch_that_overlaps_another_one_is_reported_before_it_waits(status, abort, said):
    with block(2) as where, ranks.start(1, overlapping_and_alone, where, status, abort) as started:
        (outcome,) = started.results()
    assert outcome.value == said


_ENTERS = "    report_overlap(group, kept & (seen != epoch))\n"
_LEAVES = "    if status == 0:\n        report_overlap(group, kept & (seen != running(epoch, call)))\n"
_POLLS = "foreign = own & (upper != 0) & (upper != runs)"
# (kernel, whether the other launch was there before, the edit that takes the check away)
CHECKS = {
    "enter": ("simple", True, Edit("kernels/primitives.py", _ENTERS, "")),
    "announce": ("ll", True, Edit("kernels/device/arrival.py", _ENTERS, "")),
    "poll": ("ll", False, Edit("kernels/device/arrival.py", _POLLS, _POLLS.replace("upper != 0", "upper == runs"))),
    "leave": ("simple", False, Edit("kernels/primitives.py", _LEAVES, "")),
}


def beside_another(rank, world_size, tell, where, name, shipped):
    """Rank 0's epoch word holds another launch's number before the call, or from its first wait on: what it reports."""
    protocol, before, edit = CHECKS[name]
    with loaded([] if shipped else [edit]) as copy:
        package = copy.__package__
        me, code = Rank(rank, where), importlib.import_module(f"{package}.primitives")

        def overlap(spins=0):
            me.arena[layout.EPOCHS] = 12345 << 32 | me.epoch

        if rank == 0:
            interpreter.substitute(code.pause, _give_up_after(me, 20.0, triton_adapter.yield_to_others))
            overlap() if before else interpreter.substitute(code.pause, overlap)
        wait_for_all(me)
        time.sleep(0.3 * rank)
        kernel = importlib.import_module(f"{package}.collectives.registry").find("all_reduce", "one_shot", protocol)
        me.run(kernel, torch.ones(8), poisoned(8, torch.float32), fingerprint=1)
        return me.status


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_for_another_launch_is_needed(name):
    with block(2) as where:
        assert ranks.run(2, beside_another, where, name, True) == [layout.OVERLAP, 0]
    with block(2) as where:
        assert ranks.run(2, beside_another, where, name, False) == [0, 0]
