"""The command that prints the explorer's findings in mutants of dependent launches."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from devtools import dependent_mutants
from tests.explorer.dependent import chains

NAME = "barrier"


def printed() -> tuple[int, dict[str, str]]:
    """The exit code, and the finding of each mutant."""
    result = CliRunner().invoke(dependent_mutants.main, [NAME])
    rows = (line.strip("| ").split(" | ") for line in result.output.splitlines() if line.startswith(f"| {NAME} "))
    return result.exit_code, {mutant: said for _, mutant, said in rows}


@pytest.mark.explorer
def test_every_mutant_of_a_barrier_is_reported() -> None:
    code, said = printed()
    assert code == 0 and said["unchanged"] == said["no signal"] == "nothing"
    assert "no_wait" in said["no wait"] and "race" in said["no wait"]
    assert said["signal before the wait"] == "3 kernels at once"
    moved = [text for mutant, text in said.items() if mutant.startswith("wait after")]
    assert moved and all("race" in text for text in moved)


@pytest.mark.explorer
def test_a_mutant_that_is_not_reported_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "signal_first", str)
    code, said = printed()
    assert code == 1 and said["signal before the wait"] == "nothing (WRONG)"
