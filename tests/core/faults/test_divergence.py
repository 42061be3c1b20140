"""Ranks that come apart: another root, order or grid, a call too many, nothing to send on one rank."""

import pytest

from tests import ranks
from tests.core.bodies import divergence_bodies as bodies


@pytest.mark.parametrize(("how", "words"), [("root", ["root=1", "root=0"]), ("order", ["all_reduce", "all_gather"])])
def test_another_root_or_order_is_named_on_every_rank(how, words, url):
    for kind, text, seconds in ranks.run(3, bodies.other_argument, url, how):
        assert kind == "CollectiveMismatch", text
        assert "rank 2" in text and "sequence 6" in text and all(word in text for word in words), text
        assert seconds < 2.0 + ranks.BUSY


def test_another_grid_is_refused_when_the_ranks_meet(url):
    for kind, text, seconds in ranks.run(3, bodies.other_grid, url):
        assert kind == "RendezvousError" and "other options" in text, text
        assert seconds < 2.0 + ranks.BUSY


def test_a_call_too_many_is_named_when_the_others_close(url):
    kind, text, seconds = ranks.run(3, bodies.once_too_often, url, "close", 30.0)[2]
    assert kind == "PeerDied" and "closed" in text and "all_gather" in text and "sequence 4" in text, text
    assert seconds < 2.0 + ranks.BUSY


def test_a_call_too_many_is_named_when_the_others_live_on(url):
    limit = 1.5
    kind, text, seconds = ranks.run(3, bodies.once_too_often, url, "live on", limit)[2]
    assert kind == "CollectiveTimeout" and "all_gather" in text and "has not entered sequence 4" in text, text
    assert limit * 0.5 < seconds < limit + 1.0 + ranks.BUSY


def test_an_empty_tensor_on_one_rank_is_a_call_that_it_does_not_make(url):
    limit = 1.5
    *others, _ = ranks.run(3, bodies.empty_on_one, url, False, limit)
    for kind, text, seconds in others:
        assert kind in ("CollectiveTimeout", "GroupAborted") and "has not entered sequence 2" in text, text
        assert "rank 2" in text and limit * 0.5 < seconds < limit + 1.0 + ranks.BUSY
    assert any(kind == "CollectiveTimeout" for kind, _, _ in others)


def test_an_empty_tensor_on_one_rank_and_then_another_call_is_named_at_once(url):
    for kind, text, seconds in ranks.run(3, bodies.empty_on_one, url, True, 30.0):
        assert kind == "CollectiveMismatch" and "all_reduce" in text and "barrier" in text, text
        assert seconds < 2.0 + ranks.BUSY


def test_empty_tensors_on_all_ranks_send_nothing_and_the_group_goes_on(url):
    assert ranks.run(3, bodies.empty_on_all, url) == [6.0] * 3
