"""The tree stays readable: the budgets of `house_rules`, and that each of them does complain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import house_rules
from tests.wheel_gate import ROOT

EVERYWHERE = (*house_rules.ROOMS, "devtools", "tests")
# These are known; no other may come.
CIRCLES = {
    "explorer/ptx -> explorer/ptx/analysis -> explorer/ptx/arithmetic -> explorer/ptx/generated -> "
    "explorer/ptx/operations",
    "tricomm/c10d -> tricomm/c10d/tcp",
}


def test_no_file_is_too_long() -> None:
    assert house_rules.long_files(ROOT, EVERYWHERE) == []


def test_no_folder_is_crowded() -> None:
    assert house_rules.crowded_folders(house_rules.modules(ROOT, EVERYWHERE)) == []


@pytest.mark.parametrize(
    "rule",
    [
        house_rules.long_signatures,
        house_rules.repeated_classes,
        house_rules.repeated_modules,
        house_rules.import_circles,
    ],
)
def test_a_rule_is_kept(rule: Callable[[house_rules.Sources], list[str]]) -> None:
    assert rule(house_rules.sources(ROOT)) == []


def test_folders_import_each_other_in_one_direction() -> None:
    assert [circle for circle in house_rules.folder_circles(house_rules.sources(ROOT)) if circle not in CIRCLES] == []
