"""Fixtures of the tests of c10d groups."""

import pytest

from tests.c10d.bodies.fresh_ranks import fresh_ranks


@pytest.fixture(scope="session")
def fresh():
    """Runs scripts in two ranks, each a Python from its beginning to its end."""
    with fresh_ranks() as result:
        yield result
