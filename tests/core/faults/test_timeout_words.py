"""Whoever reads messages of timeouts, PyTorch's own tests among them, looks for the word "timeout"."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tricomm

ROOT = Path(tricomm.__file__).parent.parent
SOURCES = [path for room in ("tricomm", "store", "kernels") for path in sorted((ROOT / room).rglob("*.py"))]


def makers(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions that raise or record a `CollectiveTimeout` with a text of their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(makes(child) for child in ast.walk(node)):
            yield node


def makes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    kind = node.args[0] if name(node.func) == "_blame" else node.func
    return name(kind) == "CollectiveTimeout"


def name(node: ast.AST) -> str | None:
    return getattr(node, "attr", getattr(node, "id", None))


def has_the_word(function: ast.FunctionDef) -> bool:
    texts = (node for node in ast.walk(function) if isinstance(node, ast.JoinedStr))
    parts = (part.value for text in texts for part in text.values if isinstance(part, ast.Constant))
    return any("timeout" in str(part) or "timed out" in str(part) for part in parts)


def test_every_timeout_says_so():
    results = [(path, function) for path in SOURCES for function in makers(ast.parse(path.read_text()))]
    assert len(results) >= 9
    silent = [f"{path.relative_to(ROOT)}:{function.name}" for path, function in results if not has_the_word(function)]
    assert not silent, f"CollectiveTimeout without the word timeout: {silent}"


@pytest.mark.parametrize("text,good", [('f"{x}: timeout after {s} s"', True), ('f"{x}: not finished"', False)])
def test_the_check_can_fail(text, good):
    (function,) = makers(ast.parse(f"def wait(x, s):\n    raise CollectiveTimeout({text})"))
    assert has_the_word(function) is good
