"""all_reduce + residual + RMSNorm of c10d groups: both CPU routes, groups of other backends, torch.compile."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.c10d.bodies.groups import ROUTES
from tests.core.fused import fused_bodies as bodies


@pytest.mark.parametrize(
    ("world_size", "route", "backend", "checked"),
    [
        (1, "gloo", "tricomm", 1),
        pytest.param(2, "kernels", "tricomm", 4, marks=pytest.mark.exhaustive),
        pytest.param(2, "gloo", "gloo", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_operations(world_size, route, backend, checked, url):
    assert ranks.run(world_size, bodies.ops, url, route, backend, checked, timeout=200) == [[]] * world_size


@pytest.mark.parametrize("route", ROUTES)
def test_a_wrapped_group_and_ranks_that_disagree(route, url):
    for right, counted, text in ranks.run(2, bodies.wrapped, url, route, timeout=100):
        assert right and counted == {"kernels": int(route == "kernels"), "gloo": int(route == "gloo")}
        if route == "kernels":
            assert "eps 1e-05" in text and "eps 2e-05" in text


def test_workspaces_of_process_groups(url):
    assert ranks.run(2, bodies.flashinfer, url, timeout=100) == [True, True]
