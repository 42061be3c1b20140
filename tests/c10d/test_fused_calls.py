"""all_reduce + residual + RMSNorm of c10d groups: both CPU routes, groups of other backends, torch.compile."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.c10d.bodies import fused_bodies as bodies
from tests.c10d.bodies.groups import ROUTES


@pytest.mark.parametrize(
    ("route", "backend", "checked"),
    [
        ("gloo", "tricomm", 1),
        pytest.param("kernels", "tricomm", 4, marks=pytest.mark.exhaustive),
        pytest.param("gloo", "gloo", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_operations(route, backend, checked, url):
    assert ranks.run(2, bodies.ops, url, route, backend, checked, timeout=200) == [[], []]


@pytest.mark.parametrize("route", ROUTES)
def test_a_wrapped_group_and_ranks_that_disagree(route, url):
    for right, counted, text in ranks.run(2, bodies.wrapped, url, route, timeout=100):
        assert right and counted == {"kernels": int(route == "kernels"), "gloo": int(route == "gloo")}
        if route == "kernels":
            assert "eps 1e-05" in text and "eps 2e-05" in text
