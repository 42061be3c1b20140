"""Fixtures of the tests of communicators."""

import sys
from types import ModuleType

import pytest

from tests.core.bodies import fake_nccl


@pytest.fixture
def core(monkeypatch):
    """The fake NCCL in place of the package nccl4py."""
    package = ModuleType("nccl")
    package.core = fake_nccl
    monkeypatch.setitem(sys.modules, "nccl", package)
    monkeypatch.setitem(sys.modules, "nccl.core", fake_nccl)
