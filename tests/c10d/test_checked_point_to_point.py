"""Messages between two ranks on the CPU: what does not fit is an error in Python, and nobody's end."""

import signal

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


@pytest.mark.parametrize("headed", [True, False])
def test_a_message_makes_progress_without_a_wait(headed, url):
    assert ranks.run(2, bodies.progress, url, headed) == [True, True]


def test_without_heads_gloo_ends_the_receiver(url):
    with ranks.start(2, bodies.bare, url) as started:
        sender, receiver = started.results()
    assert receiver.code == -signal.SIGABRT
    assert sender.value == "sent" or sender.error is not None


def test_a_wrapper_speaks_as_the_group_that_it_wraps(url):
    assert ranks.run(2, bodies.wrapped, url) == [True, True]
