"""docs/algorithms.md quotes the errors of quantised all-reduces as the script measures them."""

from pathlib import Path

import pytest

from devtools import wire_error
from tricomm.kernels.collectives.registry import WIRES

DOCUMENT = Path(__file__).parents[2] / "docs/algorithms.md"


@pytest.mark.parametrize(
    "kind, named",
    [("normal", "normal numbers"), ("heavy", "Student's t (2)"), ("outlier", "one outlier of 100 in each 128")],
)
def test_the_documented_errors_are_those_that_the_script_prints(kind: str, named: str) -> None:
    found = ", ".join(f"{100 * wire_error.error(kind, wire, 8):.1f}" for wire in WIRES)
    assert f"{named} {found} %" in DOCUMENT.read_text(encoding="utf-8")
