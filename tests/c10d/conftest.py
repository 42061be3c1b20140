"""Fixtures of the tests of c10d groups."""

import pytest

from tests.c10d.bodies.fresh_ranks import fresh_ranks


@pytest.fixture
def url(tmp_path):
    """Where the ranks of a test meet: a file that only this user can reach."""
    tmp_path.chmod(0o700)
    return f"file://{tmp_path}/store"


@pytest.fixture(scope="session")
def fresh():
    """Runs scripts in two ranks, each a Python from its beginning to its end."""
    with fresh_ranks() as found:
        yield found
