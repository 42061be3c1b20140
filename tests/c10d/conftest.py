"""Fixtures of the tests of c10d groups."""

import pytest

from tests.c10d.bodies.fresh_ranks import fresh_ranks
from tricomm.c10d.call_queue import CallQueue


@pytest.fixture(scope="session")
def fresh():
    """Runs scripts in two ranks, each a Python from its beginning to its end."""
    with fresh_ranks() as result:
        yield result


@pytest.fixture
def calls():
    made = CallQueue("test")
    yield made
    made.close()
