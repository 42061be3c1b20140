"""Messages between two ranks on the CPU: what does not fit is an error in Python, and nobody's end."""

import pytest

from tests import ranks
from tests.c10d.bodies import point_bodies as bodies
from tests.c10d.bodies.groups import ROUTES


@pytest.mark.parametrize("route", ROUTES)
def test_a_message_that_does_not_fit_is_named_and_the_group_goes_on(route, url):
    nothing, said = ranks.run(2, bodies.misfits, url, route)
    assert nothing == []
    for text, words in zip(
        said,
        [
            "recv of 4 elements of float32 with tag 0: rank 0 sent 8 elements of float32; give recv a tensor",
            "recv of 8 elements of float32 with tag 1: rank 0 sent 4 elements of float32",
            "recv of 4 elements of int32 with tag 2: rank 0 sent 4 elements of float32",
            "recv of 1 elements of float32 with tag 3: rank 0 sent 0 elements of float32",
            "recv of 1 elements of float32 with tag 4: rank 0 sent 1048576 elements of float32",
            "recv of 2 elements of float32 with tag 0: rank 0 sent 3 elements of float32",
        ],
        strict=True,
    ):
        assert words in text


@pytest.mark.parametrize("route", ROUTES)
def test_many_at_once(route, url):
    assert ranks.run(2, bodies.many, url, route, timeout=120) == [[], []]


@pytest.mark.parametrize("count", [9, 1 << 20], ids=["short", "announced"])
def test_a_message_makes_progress_without_a_wait(count, url):
    assert ranks.run(2, bodies.progress, url, count) == [True, True]


def test_without_the_thread_a_long_message_waits_for_its_wait(url):
    assert ranks.run(2, bodies.progress, url, 1 << 20, False) == [False, False]


def test_messages_do_not_overtake_each_other(url):
    assert ranks.run(3, bodies.in_order, url) == [[], [], []]


def test_a_long_message_that_nobody_asks_for_takes_no_memory(url):
    grown, _ = ranks.run(2, bodies.unasked, url)
    assert grown < 8 << 20


def test_threads_that_wait_at_once_move_each_others_messages(url):
    assert ranks.run(2, bodies.threads, url, timeout=120) == [[], []]


def test_without_a_descriptor_for_wakes_threads_still_wait_at_once(url):
    assert ranks.run(2, bodies.threads, url, False, timeout=120) == [[], []]


def test_a_call_on_a_group_that_is_lost_in_the_middle_of_it_fails(url):
    for kind, text in ranks.run(2, bodies.lost_in_the_middle, url):
        assert kind == "GroupAborted" and "given up in the middle" in text, text


@pytest.mark.parametrize("call", ["isend", "all_reduce"])
def test_a_signal_handlers_call_in_the_middle_of_another_is_refused(call, url):
    (kind, text), later = ranks.run(2, bodies.handlers_call, url, call)[0]
    assert kind == "InvalidArgument" and "a signal's handler makes a call" in text, text
    assert later[0] == "GroupAborted", later  # the first call was left in the middle


def test_a_collective_of_another_size_is_named_without_records(url):
    for kind, text in ranks.run(2, bodies.unrecorded, url):
        assert kind in ("CollectiveMismatch", "GroupAborted") and "bytes and not" in text, text


def test_a_wrapper_speaks_as_the_group_that_it_wraps(url):
    assert ranks.run(2, bodies.wrapped, url) == [True, True]
