"""Groups that share members, each with its own arena: any collectives and messages, in turns, between processes."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.core.bodies import overlapping_bodies


@pytest.mark.parametrize("seed", [0, *[pytest.param(n, marks=pytest.mark.soak) for n in range(1, 20)]])
def test_any_calls_on_overlapping_groups(tmp_path, seed):
    result = ranks.run(3, overlapping_bodies.any_calls, f"file://{tmp_path}/store", seed, 40, timeout=200)
    assert [wrong for wrong, _ in result] == [[]] * 3
    assert all(made >= 20 for _, made in result)
