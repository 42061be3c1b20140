"""docs/faults.md names a test for every fault, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULTS = [f"F{number:02}" for number in range(1, 49)]
ROW = re.compile(r"^\| (F\d\d) \| (.+?) \| (.+?) \| (.*?) ?\| (.+) \|$")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`( \(gpu\))?")


@cache
def named_in(file: str) -> tuple[set[str], bool]:
    """The names of a file's tests, and whether it has some that need a GPU."""
    path = ROOT / file
    if not path.is_file():
        return set(), False
    source = path.read_text()
    names = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}, "pytest.mark.gpu" in source


def faults(text: str) -> list[str]:
    """What is wrong with a table."""
    rows = [match.groups() for line in text.splitlines() if (match := ROW.match(line))]
    wrong = [f"{number} is missing" for number in FAULTS if number not in [row[0] for row in rows]]
    numbers = [row[0] for row in rows]
    wrong += [f"{number} is there twice" for number in set(numbers) if numbers.count(number) > 1]
    for number, _, _, _, shown in rows:
        result = TEST.findall(shown)
        if not any(not gpu for _, _, gpu in result):
            wrong.append(f"{number} names no test that runs without a GPU")
        for file, name, gpu in result:
            known, on_gpu = named_in(file)
            if name not in known:
                wrong.append(f"{number}: there is no {file}::{name}")
            elif gpu and not on_gpu:
                wrong.append(f"{number}: {file}::{name} needs no GPU")
        if "`" in TEST.sub("", shown).replace("`make soak-faults MINUTES=60`", ""):
            wrong.append(f"{number}: {TEST.sub('', shown).strip(' ,')} is no test")
    return wrong


def document() -> str:
    return (ROOT / "docs" / "faults.md").read_text()


def test_every_fault_has_a_row_and_every_test_exists():
    assert faults(document()) == []
