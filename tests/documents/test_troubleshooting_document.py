"""docs/troubleshooting.md lists the environment variables that the code reads, and no others."""

from __future__ import annotations

import ast
import re

from tests.house_rules import ROOMS
from tests.wheel_gate import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OWN = re.compile(r"TRICOMM_[A-Z0-9_]+|(VLLM|SGLANG)_TRICOMM")
SOURCES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]


def in_code() -> set[str]:
    """All strings of the product."""
    nodes = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def in_table() -> list[str]:
    rows = [line for line in PAGE.partition("## Environment variables")[2].splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([A-Z0-9_]+)`", row.split("|")[1])]


def test_each_variable_is_in_the_table_once() -> None:
    table = in_table()
    assert sorted(table) == sorted(set(table))
    assert {name for name in in_code() if OWN.fullmatch(name)} == {name for name in table if OWN.fullmatch(name)}


def test_each_variable_of_others_is_in_the_code() -> None:
    assert set(in_table()) <= in_code()


def test_messages_that_the_page_quotes_are_in_the_code() -> None:
    quoted = (
        "did not come; has other options; bad MAC; bad version; of waiting for the interpreter; overlapped; "
        "hardware queues; duplicate rank; is gone; need greenlet; TRITON_INTERPRET is set; has not come back"
    ).split("; ")
    code = "\n".join(path.read_text() for path in SOURCES)
    assert [text for text in quoted if text not in PAGE or text not in code] == []
