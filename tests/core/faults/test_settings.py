"""A setting of one rank that makes no sense is told to all at once, by its name; and one that only torch's defaults
follow changes nothing."""

import pytest

from tests import ranks
from tests.core.bodies import settings_bodies as bodies

SENSELESS = [
    ("communicator", "TRICOMM_BATCH_INVARIANT", "perhaps"),
    ("communicator", "TRICOMM_STATS", "soon"),
    ("communicator", "TRICOMM_STATS_EVERY", "x"),
    ("communicator", "RANK", "x"),
    ("communicator", "WORLD_SIZE", "many"),
    ("kernels", "TRICOMM_ARENA_BYTES", "100"),
    ("kernels", "TRICOMM_STATS", "soon"),
    ("gloo", "TRICOMM_CHECK", "x"),
]


@pytest.mark.parametrize("route, name, value", SENSELESS)
def test_a_senseless_variable_of_one_rank_is_told_to_all(route, name, value, url):
    ((kind, text, seconds), x), (mine, y) = ranks.run(2, bodies.senseless, url, route, name, value)
    assert mine[0] == "InvalidArgument" and f"{name}=" in mine[1]
    assert kind in ("InvalidArgument", "RendezvousError") and name in text and "rank" in text, (kind, text)
    assert seconds < 1.0 + ranks.BUSY
    assert x == y == [2.0, 2.0]


def test_a_token_and_a_name_of_a_node_are_bytes(url):
    assert ranks.run(2, bodies.token_of_bytes, url, b"\xffsecret\xfe", b"n\xf6de") == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("route", ["communicator", "gloo", "kernels"])
def test_torchs_default_device_and_type_change_nothing(route, url):
    ones, twos = [1.0] * 4, [2.0] * 4
    want = [twos, twos]
    if route == "communicator":
        want = [twos, ones + ones, [2.0, 2.0], ones, ones, ones, twos]
    assert ranks.run(2, bodies.elsewhere, url, route) == [want] * 2
