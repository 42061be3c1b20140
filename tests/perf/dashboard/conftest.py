"""Fixtures of the tests of the dashboard."""

from pathlib import Path

import pytest


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_STATS_DIR", str(tmp_path / "live"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
