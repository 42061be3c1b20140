"""docs/faults.md names every fault, and `fault_tests.json` at least one test of each that needs no GPU."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = [f"F{number:02}" for number in range(1, 51)]
NAMED = re.compile(r"^\| (F\d\d) \||\((F\d\d)\)", re.MULTILINE)


@cache
def named_in(file: str) -> tuple[frozenset[str], bool]:
    """The names of a file's tests, and whether any of them needs a GPU."""
    path = ROOT / file
    if not path.is_file():
        return frozenset(), False
    source = path.read_text()
    names = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return frozenset(name for name in names if name.startswith("test_")), "pytest.mark.gpu" in source


def problems(page: str, tests: Mapping[str, Sequence[str]]) -> list[str]:
    """The faults that are missing from the page or from the tests, and the tests that do not exist."""
    named = [row or aside for row, aside in NAMED.findall(page)]
    wrong = [f"the page has {fault} {named.count(fault)} times" for fault in FAULTS if named.count(fault) != 1]
    wrong += [f"{fault} is unknown" for fault in {*named, *tests} - {*FAULTS}]
    for fault in FAULTS:
        of_fault = [test.split("::") for test in tests.get(fault, ())]
        if all(named_in(file)[1] for file, _ in of_fault):
            wrong.append(f"{fault} has no test that runs without a GPU")
        wrong += [f"{fault}: there is no {file}::{name}" for file, name in of_fault if name not in named_in(file)[0]]
    return wrong


def kept() -> tuple[str, dict[str, list[str]]]:
    return (ROOT / "docs" / "faults.md").read_text(), json.loads(
        (ROOT / "tests" / "documents" / "fault_tests.json").read_text()
    )


def test_every_fault_is_described_and_tested():
    assert problems(*kept()) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda page, tests: (page.replace("| F01 |", "| |"), tests), "the page has F01 0 times"),
        (lambda page, tests: (page + "\n| F01 | again |", tests), "the page has F01 2 times"),
        (lambda page, tests: (page, tests | {"F99": []}), "F99 is unknown"),
        (lambda page, tests: (page, tests | {"F02": []}), "F02 has no test that runs without a GPU"),
        (lambda page, tests: (page, tests | {"F03": ["tests/test_house.py::test_no"]}), "F03: there is no tests/test_"),
    ],
)
def test_a_gap_is_found(change, problem):
    (found,) = problems(*change(*kept()))
    assert found.startswith(problem)
