"""`tricomm info` for people: a screen, or everything."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_MOST_RANGES = 20  # lines
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def show(facts: dict[str, Any], console: Console, whole: bool = False) -> None:
    """Print what `info.collect` found: selection as ranges of sizes, or as `whole` tables with the reasons."""
    for section, value in facts.items():
        if section in ("selection", "ranges") and isinstance(value, list):
            if section == "selection" and whole:
                console.print("[bold]selection[/] (input bytes per rank)")
                console.print(_choices(value))
            elif section == "ranges" and not whole:
                console.print("[bold]selection[/] by input bytes per rank; --table says why")
                _print(console, ranges(value))
        elif whole:
            console.print(f"[bold]{section}[/]")
            _print(console, _lines(value, 1))
        elif section == "paths" and isinstance(value, dict):
            _print(console, [f"{name:<15} {path}" for name, path in value.items()])
        elif section not in ("selection", "ranges"):
            _print(console, [f"{section.replace('_', ' '):<15} {_brief(value)}"])


def ranges(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each kind of choice; collectives and numbers of ranks that choose alike share one."""
    said: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        said.setdefault((row["collective"], row["ranks"]), []).append(row)
    alike: dict[tuple[str, str], dict[str, list[int]]] = {}
    for (collective, ranks), mine in said.items():
        tables = ", ".join(dict.fromkeys(str(row["table"]) for row in mine))
        key = ", ".join(map(_range, mine)), tables
        alike.setdefault(key, {}).setdefault(collective, []).append(ranks)
    lines = []
    for (text, tables), who in alike.items():
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for collective, worlds in who.items():
            by_ranks.setdefault(tuple(worlds), []).append(collective)
        for world, names in by_ranks.items():
            lines.append(f"  {', '.join(names)} of {', '.join(map(str, world))} ranks: {text} (table {tables})")
    more = len(lines) - _MOST_RANGES
    return lines if more <= 0 else [*lines[:_MOST_RANGES], f"  and {more} more: --table"]


def _range(row: dict[str, Any]) -> str:
    kernel = f"{row['algorithm']}/{row['protocol']}"
    if row["to"] is None:
        return f"any size {kernel}" if row["from"] == 1 else f"above {kernel}"
    return f"{'1 B ' if row['from'] == 1 else ''}.. {_size(row['to'])} {kernel}"


def _size(nbytes: int) -> str:
    """Exact, in the largest unit that divides it."""
    return next((f"{nbytes // unit} {name}" for unit, name in _UNITS if nbytes % unit == 0), f"{nbytes} B")


def _brief(value: Any) -> str:
    """One line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_brief(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        cells = [cell for row in value for cell in row if cell is not None]
        return "every pair" if all(cells) else f"{sum(map(bool, cells))} of {len(cells)} pairs"
    if isinstance(value, list):
        apart = ("index", "uuid", "remote")  # what differs between devices that are alike
        texts = [_brief({n: v for n, v in x.items() if n not in apart} if isinstance(x, dict) else x) for x in value]
        counts = {text: texts.count(text) for text in texts}
        return "; ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items()) or "none"
    return str(value)


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
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
