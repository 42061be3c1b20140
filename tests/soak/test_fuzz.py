"""The fuzz of torch.distributed's calls: a short run, mistakes that it must find, and 20,000 calls a route."""

import pytest

from tests.c10d.bodies.groups import ROUTES
from tests.soak import fuzz
from tests.soak.fuzz_calls import KINDS


@pytest.mark.parametrize(
    ("route", "calls", "callbacks"), [("gloo", 150, False), ("gloo", 150, True), ("kernels", 80, True)]
)
def test_random_calls(route, calls, callbacks, url):
    made, wrong = fuzz.run(url, route, calls, seed=5, callbacks=callbacks)
    assert wrong == [] and made.total() >= 3 * calls
    assert set(made) | {"manager"} == {kind.__name__ for kind in KINDS}


def test_a_wrong_result_is_found(url):
    _, wrong = fuzz.run(url, "gloo", 60, seed=5, callbacks=False, inject="wrong")
    assert "rank 1: " in str(wrong) and "instead of" in str(wrong)


def test_a_call_that_one_rank_leaves_out_is_found(url):
    _, wrong = fuzz.run(url, "gloo", 60, seed=5, callbacks=False, inject="skip")
    assert "CollectiveMismatch" in str(wrong) or "CollectiveTimeout" in str(wrong)


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_random_calls(world_size, route, url):
    made, wrong = fuzz.run(url, route, 20_000, seed=11 + world_size, world_size=world_size)
    assert wrong == [] and made.total() >= 20_000 * world_size
