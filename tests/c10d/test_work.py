"""Work and Future as c10d defines them, order between groups and threads, faults, bad input."""

import os
import re
import signal

import pytest

from tests import ranks
from tests.c10d.bodies import work_bodies as bodies
from tests.c10d.bodies.groups import ROUTES


@pytest.mark.parametrize("route", ROUTES)
def test_handles_and_futures(route, url):
    assert ranks.run(2, bodies.handles, url, route, timeout=120) == [[]] * 2


def test_an_asynchronous_call_does_not_block(url):
    assert ranks.run(2, bodies.does_not_block, url) == [(False, [2.0] * 3)] * 2


def test_overlapping_groups_in_opposite_orders(url):
    assert ranks.run(3, bodies.opposite_orders, url) == [(3.0, 9.0), (3.0, 9.0), (3.0, 9.0)]


def test_threads_with_a_group_each(url):
    assert ranks.run(2, bodies.threads, url) == [[]] * 2


@pytest.mark.parametrize("route", ROUTES)
def test_different_calls_are_named_on_every_rank_and_the_group_goes_on(route, url):
    for said in ranks.run(3, bodies.mismatches, url, route, timeout=120):
        assert "130000" in said[0] and "30000" in said[0] and "[2]" in said[0]
        assert "int32" in said[1] and "max" in said[2] and "root=1" in said[3] and "barrier" in said[4]
        assert "rank 2 expects" not in said[6] and "sends 2 elements to rank 2, which expects 3" in said[6]


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later"])
def test_one_rank_in_a_kernel_and_one_in_nccl_are_named_at_once(first, url):
    (kernel, seconds), (nccl, others) = ranks.run(2, bodies.another_way, url, first)
    assert seconds < 10 and others < 10
    assert nccl[0] == "left"  # it was told to
    for kind, text in [kernel[0], kernel[1], nccl[1]]:
        assert kind == "CollectiveMismatch"
        assert "dtype=float32" in text and "dtype=complex32" in text and "make the same call" in text


def test_what_nccl_refuses_on_one_rank_consumes_nothing(url):
    assert ranks.run(2, bodies.refused_by_nccl, url) == [["refused", "native", 2.0], ["native", 2.0]]


def test_without_the_comparison_the_kernel_waits_until_its_time_is_up(url):
    (kernel, seconds), _ = ranks.run(2, bodies.another_way, url, False, False)
    assert kernel[0][0] == "CollectiveTimeout" and seconds > 2


@pytest.mark.parametrize("route", ROUTES)
def test_bad_input_is_refused_and_the_group_goes_on(route, url):
    assert ranks.run(2, bodies.refusals, url, route, timeout=120) == [20, 20]


def test_a_rank_that_does_not_come(url):
    *others, _ = ranks.run(3, bodies.absent, url)
    for text, seconds in others:
        assert re.search(" (Timed out|closed|timeout) ", text)  # as PyTorch's test_barrier_timeout_global wants it
        assert "all_reduce" in text and 2.0 < seconds < 60


def test_a_rank_that_dies(url):
    with ranks.start(2, bodies.killed, url) as started:
        pids = started.messages()
        os.kill(pids[1], signal.SIGKILL)
        outcomes = started.results()
    assert outcomes[0].error is None, outcomes[0].text
    assert "all_reduce" in outcomes[0].value
