"""No earlier test has left a warning that is logged once, or an NVTX domain."""

from __future__ import annotations

import pytest

from tricomm.metrics import call_trace, flight_recorder


@pytest.fixture
def forgotten(monkeypatch):
    monkeypatch.setattr(flight_recorder, "_warned", set())
    call_trace._domain.cache_clear()
    yield
    call_trace._domain.cache_clear()
