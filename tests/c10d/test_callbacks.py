"""Order never depends on time: calls in callbacks, in threads, and errors that one rank alone has."""

import pytest

from tests import ranks
from tests.c10d.bodies import callback_bodies as bodies
from tests.c10d.bodies.groups import ROUTES

both_routes = pytest.mark.parametrize("route", ROUTES)


@both_routes
@pytest.mark.parametrize(("slow", "late"), [(True, False), (False, True)], ids=["slow", "late"])
def test_calls_of_callbacks_meet_the_same_calls(route, slow, late, url):
    assert ranks.run(2, bodies.slow_or_late, url, route, slow, late) == [[]] * 2


def test_without_their_places_late_callbacks_meet_others(url):
    wrong = ranks.run(2, bodies.slow_or_late, url, "gloo", False, True, True)
    assert all(wrong)


@both_routes
def test_a_callback_of_one_rank_alone_is_a_mismatch_and_no_sum(route, url):
    (x, y, error), (*others, told) = ranks.run(2, bodies.one_sided, url, route)
    assert [x, y] == others == [[2.0] * 4, [6.0] * 4]
    assert error.startswith("CollectiveMismatch") and "call 1/1/1" in error and "rank(s) [1] have not made" in error
    assert told.startswith("CollectiveMismatch") and "gave the group up" in told


@both_routes
def test_hooks_train_as_over_gloo_if_a_rank_is_slow(route, url):
    assert ranks.run(2, bodies.hooks, url, route, 3, timeout=200) == [[]] * 2


@pytest.mark.soak
@both_routes
def test_hooks_train_as_over_gloo_for_long(route, url):
    assert ranks.run(2, bodies.hooks, url, route, 100, timeout=3600) == [[]] * 2


@both_routes
def test_groups_in_threads_do_not_wait_crosswise(route, url):
    assert ranks.run(2, bodies.two_threads, url, route) == [[[2.0] * 4, [4.0] * 4]] * 2


@both_routes
def test_tensors_of_inference_mode(route, url):
    assert ranks.run(2, bodies.inference, url, route) == [[]] * 2


def test_an_error_before_anything_is_sent_is_told_and_costs_nobody_the_group(url):
    (told, soon, after), (error, also_soon, same) = ranks.run(2, bodies.of_one_rank, url, "gloo", "before")
    assert error == "RuntimeError: no room here" and soon and also_soon
    assert told.startswith("CollectiveMismatch") and "a rank cannot make the call" in told and "no room here" in told
    assert after == same == [2.0] * 3


def test_an_error_after_the_last_message_is_of_that_rank_alone(url):
    (none, soon, after), (error, also_soon, same) = ranks.run(2, bodies.of_one_rank, url, "gloo", "after")
    assert (none, error) == ("none", "RuntimeError: no room here") and soon and also_soon
    assert after == same == [2.0] * 3


def test_an_error_in_the_middle_ends_the_call_everywhere(url):
    outcomes = ranks.run(2, bodies.of_one_rank, url, "gloo", "during")
    assert all(error.startswith("GroupAborted") and "no room here" in error and soon for error, soon, _ in outcomes)
    assert [after for *_, after in outcomes] == ["GroupAborted"] * 2
