"""Fixtures of the tests of c10d groups."""

import pytest


@pytest.fixture
def url(tmp_path):
    """Where the ranks of a test meet: a file that only this user can reach."""
    tmp_path.chmod(0o700)
    return f"file://{tmp_path}/store"
