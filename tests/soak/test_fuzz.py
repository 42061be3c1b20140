"""The fuzz of torch.distributed's calls: short, with mistakes that it has to find, and 20,000 calls a route."""

import pytest

from tests.c10d.bodies.groups import ROUTES
from tests.soak import fuzz
from tests.soak.fuzz_calls import KINDS


@pytest.mark.parametrize(
    ("route", "calls", "callbacks"), [("gloo", 150, "none"), ("gloo", 150, "all"), ("kernels", 80, "all")]
)
def test_random_calls(route, calls, callbacks, url):
    made, wrong = fuzz.run(url, route, calls, seed=5, callbacks=callbacks)
    assert wrong == [] and made.total() >= 3 * calls
    assert set(made) | {"manager"} == {kind.__name__ for kind in KINDS}


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_random_calls(world_size, route, url):
    made, wrong = fuzz.run(url, route, 20_000, seed=11 + world_size, world_size=world_size)
    assert wrong == [] and made.total() >= 20_000 * world_size
