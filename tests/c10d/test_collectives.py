"""Every collective of the c10d surface on both CPU routes, 2 to 4 processes."""

import pytest

from tests import ranks
from tests.c10d.bodies import alias_bodies, broadcast_bodies, point_bodies
from tests.c10d.bodies import collective_bodies as bodies
from tests.c10d.bodies.groups import ROUTES

EACH = [bodies.strided, bodies.coalesced, point_bodies.points, bodies.premultiplied, bodies.one_element]
# Interpreted, a call takes long: of all pairs of type and operation so many that each of either is there.
REST = pytest.param("kernels", 1, marks=pytest.mark.soak)
PAIRS = pytest.mark.parametrize(("route", "step"), [("gloo", 1), ("kernels", 3), REST])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("body", EACH, ids=lambda b: b.__name__)
def test_collectives(body, world_size, route, url):
    assert ranks.run(world_size, body, url, route, timeout=200) == [[]] * world_size


@pytest.mark.parametrize("route", ROUTES)
def test_tensors_that_share_memory(route, url):
    assert ranks.run(2, alias_bodies.overlapping, url, route) == [[], []]


@pytest.mark.parametrize("world_size", [1, 3, *[pytest.param(n, marks=pytest.mark.soak) for n in (2, 4)]])
@PAIRS
def test_every_call_of_every_type_and_operation(world_size, route, step, url):
    assert ranks.run(world_size, bodies.of_every_type, url, route, step, timeout=200) == [[]] * world_size


@pytest.mark.parametrize("route", ROUTES)
def test_autograd_does_not_see_a_call(route, url):
    assert ranks.run(2, bodies.unseen, url, route) == [[], []]


# Broadcasts in shares


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_a_broadcast_in_shares_is_exact_from_every_root(world_size, url):
    assert ranks.run(world_size, broadcast_bodies.exact, url) == [([], world_size > 2)] * world_size


def test_shares_of_a_broadcast_in_the_wrong_order_are_seen(url):
    wrong = [found for found, _ in ranks.run(4, broadcast_bodies.exact, url, True)]
    assert wrong[1] and wrong[0] == wrong[2] == wrong[3] == []


@pytest.mark.parametrize(("lost", "exchange"), [(0, 1), (2, 1), (2, 2)], ids=["root", "before", "between"])
def test_a_rank_that_dies_in_the_middle_of_a_broadcast_is_named(lost, exchange, url):
    with ranks.start(4, broadcast_bodies.dies, url, lost, exchange) as started:
        outcomes = started.results()
    for rank, outcome in enumerate(outcomes):
        if rank != lost:
            kind, text, seconds = outcome.value
            assert kind == "PeerDied" and f"[{lost}]" in text and seconds < 2.0, outcome.value


def test_different_broadcasts_are_refused_and_the_group_goes_on(url):
    for said in ranks.run(4, broadcast_bodies.mismatches, url, True):
        assert [kind for kind, _ in said] == ["CollectiveMismatch"] * 3, said


def test_a_broadcast_of_another_size_is_named_without_records(url):
    said = [kind for ((kind, text),) in ranks.run(4, broadcast_bodies.mismatches, url, False)]
    assert set(said[1:]) <= {"CollectiveMismatch", "GroupAborted"} and "CollectiveMismatch" in said, (
        said
    )  # the root, rank 0, has sent all
