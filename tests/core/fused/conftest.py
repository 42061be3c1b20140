"""Fixtures of the tests of fused calls: those of c10d groups."""

from tests.c10d.conftest import url

__all__ = ["url"]
