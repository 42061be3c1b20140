"""Tensors that require grad, and tensors that wrap other tensors: as over Gloo alone, on both routes."""

import pytest

from tests import ranks
from tests.c10d.bodies import gradient_bodies as bodies
from tests.c10d.bodies.groups import ROUTES


@pytest.mark.parametrize("route", ROUTES)
def test_tensors_that_require_grad(route, url):
    assert ranks.run(2, bodies.gradients, url, route) == [[], []]


def test_with_grad_mode_on_in_the_worker_they_are_refused(url):
    with ranks.start(2, bodies.gradients, url, "kernels", True) as started:
        assert any(outcome.error == "InvalidArgument" for outcome in started.results())


@pytest.mark.parametrize("route", ROUTES)
def test_tensors_that_wrap_others(route, url):
    assert ranks.run(2, bodies.wrappers, url, route) == [[], []]
