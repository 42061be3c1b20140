"""`tricomm info` for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(facts: dict[str, Any], console: Console) -> None:
    """Print what `info.collect` found."""
    for section, value in facts.items():
        if section == "selection" and isinstance(value, list):
            console.print("[bold]selection[/] (input bytes per rank)")
            console.print(_choices(value))
            continue
        console.print(f"[bold]{section}[/]")
        for line in _lines(value, 1):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    if isinstance(value, dict):
        if not value:
            return [pad + "none"]
        found = []
        for name, inner in value.items():
            nested = isinstance(inner, dict | list)
            found += [f"{pad}{name}", *_lines(inner, depth + 1)] if nested else [f"{pad}{name:<22} {inner}"]
        return found
    if isinstance(value, list):
        if value and all(isinstance(row, list) for row in value):  # a matrix
            cells = {True: "yes", False: " no", None: "  -"}
            return [pad + " ".join(cells.get(cell, str(cell)) for cell in row) for row in value]
        return [line for item in value for line in _lines(item, depth)] or [pad + "none"]
    return [f"{pad}{value}"]


def _choices(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("collective", "ranks", "bytes", "kernel", "why"):
        table.add_column(name, justify="right" if name in ("ranks", "bytes") else "left", overflow="fold")
    for r in rows:
        kernel = f"{r['algorithm']}/{r['protocol']}"
        table.add_row(r["collective"], str(r["ranks"]), str(r["nbytes"]), kernel, r["reason"])
    return table
