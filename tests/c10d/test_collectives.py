"""Every collective of the c10d surface on both CPU routes, 2 to 4 processes."""

import pytest

from tests import ranks
from tests.c10d.bodies import alias_bodies
from tests.c10d.bodies import collective_bodies as bodies
from tests.c10d.bodies.groups import ROUTES

EACH = [bodies.uneven, bodies.strided, bodies.coalesced, bodies.points, bodies.premultiplied, bodies.one_element]
# Interpreted, a call takes long: of all pairs of type and shape, or operation, so many that each of either is there.
REST = pytest.param("kernels", 1, marks=pytest.mark.soak)
SHAPES = pytest.mark.parametrize(("route", "step"), [("gloo", 1), ("kernels", 4), REST])
OPERATIONS = pytest.mark.parametrize(("route", "step"), [("gloo", 1), ("kernels", 3), REST])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("body", EACH, ids=lambda b: b.__name__)
def test_collectives(body, world_size, route, url):
    assert ranks.run(world_size, body, url, route, timeout=200) == [[]] * world_size


@pytest.mark.parametrize("route", ROUTES)
def test_tensors_that_share_memory(route, url):
    assert ranks.run(2, alias_bodies.overlapping, url, route) == [[], []]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])
@SHAPES
def test_movements_of_every_type(world_size, route, step, url):
    assert ranks.run(world_size, bodies.movements, url, route, step, timeout=200) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, *[pytest.param(n, marks=pytest.mark.soak) for n in (3, 4)]])
@OPERATIONS
def test_reductions_of_every_type_and_operation(world_size, route, step, url):
    assert ranks.run(world_size, bodies.reductions, url, route, step, timeout=200) == [[]] * world_size


@OPERATIONS
def test_a_group_of_one(route, step, url):
    for body in (bodies.reductions, bodies.movements):
        assert ranks.run(1, body, f"{url}{body.__name__}", route, step, timeout=200) == [[]]


@pytest.mark.parametrize("route", ROUTES)
def test_autograd_does_not_see_a_call(route, url):
    assert ranks.run(2, bodies.unseen, url, route) == [[], []]
