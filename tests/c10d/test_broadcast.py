"""Large broadcasts over messages: the root scatters, the others gather from each other."""

import pytest

from tests import ranks
from tests.c10d.bodies import broadcast_bodies as bodies

REFUSED = ("CollectiveMismatch", "GroupAborted")


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_every_root_and_size_is_exact(world_size, url):
    assert ranks.run(world_size, bodies.exact, url) == [([], world_size > 2)] * world_size


def test_shares_in_the_wrong_order_are_seen(url):
    wrong = [found for found, _ in ranks.run(4, bodies.exact, url, True)]
    assert wrong[1] and wrong[0] == wrong[2] == wrong[3] == []


@pytest.mark.parametrize(("lost", "exchange"), [(0, 1), (2, 1), (2, 2)], ids=["root", "before", "between"])
def test_a_rank_that_dies_in_the_middle_is_named(lost, exchange, url):
    with ranks.start(4, bodies.dies, url, lost, exchange) as started:
        outcomes = started.results()
    for rank, outcome in enumerate(outcomes):
        if rank != lost:
            kind, text, seconds = outcome.value
            assert kind == "PeerDied" and f"[{lost}]" in text and seconds < 2.0, outcome.value


def test_different_calls_are_refused_and_the_group_goes_on(url):
    for said in ranks.run(4, bodies.mismatches, url, True):
        assert [kind for kind, _ in said] == ["CollectiveMismatch"] * 3, said


def test_another_size_is_named_without_records(url):
    said = [kind for ((kind, text),) in ranks.run(4, bodies.mismatches, url, False)]
    assert set(said[1:]) <= set(REFUSED) and "CollectiveMismatch" in said, said  # the root, rank 0, has sent all
