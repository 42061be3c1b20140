"""Every collective of the c10d surface on both CPU routes, 2 to 4 processes."""

import pytest

from tests import ranks
from tests.c10d import collective_bodies as bodies
from tests.c10d.groups import ROUTES

EACH = [bodies.movements, bodies.uneven, bodies.strided, bodies.coalesced, bodies.points]


@pytest.fixture
def url(tmp_path):
    tmp_path.chmod(0o700)
    return f"file://{tmp_path}/store"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("body", EACH, ids=lambda b: b.__name__)
def test_collectives(body, world_size, route, url):
    assert ranks.run(world_size, body, url, route, timeout=200) == [[]] * world_size


@pytest.mark.parametrize(
    ("world_size", "route"), [(3, "gloo"), (2, "kernels"), pytest.param(4, "gloo", marks=pytest.mark.soak)]
)
def test_reductions_of_every_type_and_operation(world_size, route, url):
    assert ranks.run(world_size, bodies.reductions, url, route, timeout=200) == [[]] * world_size


@pytest.mark.parametrize("route", ROUTES)
def test_a_group_of_one(route, url):
    for body in (bodies.reductions, bodies.movements):
        assert ranks.run(1, body, f"{url}{body.__name__}", route, timeout=200) == [[]]
