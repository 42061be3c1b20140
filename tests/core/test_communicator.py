"""The communicator between real processes: results, argument errors, life, two groups, a user's kernels."""

import gc
import random
import weakref

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tests import ranks
from tests.core.bodies import common_bodies
from tests.core.bodies.exact import anything
from tricomm.kernels.collectives import registry
from tricomm.policy import backend_choice


@pytest.fixture
def other(tmp_path):
    return f"file://{tmp_path}/other"


KERNELS = [k for k in registry.KERNELS if not k.needs_cube and k.collective != "barrier"]


@pytest.mark.parametrize("world_size", [1, 2, 3, *[pytest.param(n, marks=pytest.mark.exhaustive) for n in (4, 5, 8)]])
def test_every_kernel(world_size, url):
    """Between processes, back to back; tests/core/test_collectives.py has every type, operation and size."""
    draw = random.Random(world_size)
    cases = [anything(draw, kernel, world_size) for kernel in KERNELS]
    assert ranks.run(world_size, common_bodies.every_case, url, cases, timeout=200) == [[]] * world_size


def test_a_refused_call_consumes_nothing_and_the_group_goes_on(url):
    assert ranks.run(2, common_bodies.bad_then_good, url) == [4, 4]


def test_close_use_after_close_and_again_over_the_same_store(url):
    assert ranks.run(2, common_bodies.life, url) == [{}, {}]


def test_a_forked_copy_refuses_and_the_parent_goes_on(url):
    for code, x in ranks.run(2, common_bodies.forked, url):
        assert code == 7 and x == [2.0, 2.0, 2.0]


def test_launches_that_do_not_fit_are_refused_and_those_that_wait_are_bounded(url):
    for refused, seconds in ranks.run(2, common_bodies.bad_launches, url):
        assert refused == 12 and seconds < 6.0


def test_many_launches_are_not_taken_for_one_long_one(url):
    assert ranks.run(2, common_bodies.many_launches, url) == ["fine"] * 2


def test_threads_that_share_a_communicator_take_turns(url):
    assert ranks.run(2, common_bodies.three_threads, url) == [(0, 30)] * 2


def test_two_threads_use_two_groups_in_opposite_orders(url, other):
    assert ranks.run(2, common_bodies.opposite_orders, url, other) == [[4.0, 4.0]] * 2


def test_symmetric_memory_and_a_users_kernel(url):
    for rank, (seen, out, addresses, reduced, refused) in enumerate(ranks.run(3, common_bodies.memory, url)):
        assert seen == [0.0, 1.0, 2.0]
        assert out == [float((rank + 1) % 3)] * 15
        assert addresses == 3 and reduced == 45.0
        assert refused is not None and "rank 0 has " in refused and "rank 1 has " in refused


def test_split(url):
    refused, result = zip(*ranks.run(3, common_bodies.splits, url), strict=True)
    assert all(sum(each) == len(each) == 7 for each in refused)
    pair, three = [100.0, 0.0, 1.0, 1.0], [100.0, 0.0, 10.0, 1.0, 1.0, 2.0]
    assert result[0] == [(1, 2, pair), (2, 3, three), [2.0], [3.0]]
    assert result[1] == [(0, 1, [10.0, 0.0]), (1, 3, three), [3.0]]
    assert result[2] == [(0, 2, pair), (0, 3, three), [2.0], [3.0]]


def test_ranks_of_one_process_have_nothing_to_meet_over():
    with pytest.raises(tricomm.InvalidArgument, match="no store to meet over"):
        tricomm.simulate(lambda comm: comm.split([0]), 2)


def test_nothing_of_a_closed_communicator_waits_for_the_garbage_collector():
    """Or its memory would stay mapped until that runs: parts that refer to each other let go when it is closed."""
    gc.collect()
    gc.disable()
    try:
        comm = tricomm.Communicator(HashStore(), 0, 1, "cpu", options=tricomm.Options(arena_bytes=256 * 1024))
        comm.all_reduce(torch.ones(3))
        comm.barrier()
        parts = [weakref.ref(part) for part in (comm, comm._group, comm._faults, comm._planner, comm._messages)]
        comm.close()
        del comm
        assert [part() for part in parts] == [None] * 5
    finally:
        gc.enable()


@pytest.mark.parametrize("without", [None, "beside_compute", "batch_invariant"])
def test_calls_that_the_switch_may_add_are_routed_as_such(without, monkeypatch):
    seen, decide = [], backend_choice.decide

    def spied(facts, *call):
        seen.append(facts.switch)
        return decide(facts, *call)

    monkeypatch.setattr(backend_choice, "decide", spied)
    options = tricomm.Options(arena_bytes=256 * 1024, **({without: True} if without else {}))
    with tricomm.Communicator(HashStore(), 0, 1, "cpu", options=options) as comm:
        assert comm._internal.routes.switch is (without is None), "the interpreter needs no switch"
        comm.all_reduce(torch.ones(64))
    assert seen and set(seen) == {without is None}
