"""The output of `tricomm info` for people: a screen, or everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tricomm.perf import text_table, units

_MOST_RANGES = 20  # lines


def lines(facts: dict[str, Any], whole: bool = False) -> list[str]:
    """The facts of `info.collect`: selection as ranges of sizes, or with `whole` as a table with the reasons."""
    return list(_whole(facts) if whole else _screen(facts))


def _screen(facts: dict[str, Any]) -> Iterator[str]:
    rows: list[tuple[str, str]] = []
    for section, value in facts.items():
        if section == "paths" and isinstance(value, dict):
            rows += [(name, str(path)) for name, path in value.items()]
        elif section not in ("selection", "ranges"):
            rows.append((section.replace("_", " "), _brief(_readable(value, "") if section == "limits" else value)))
    yield from text_table.grid(rows)
    if isinstance(facts["ranges"], list):
        yield "selection by input bytes per rank; --table says why"
        yield from ranges(facts["ranges"])


def _whole(facts: dict[str, Any]) -> Iterator[str]:
    for section, value in facts.items():
        if section == "selection" and isinstance(value, list):
            yield "selection (input bytes per rank)"
            header = ("collective", "ranks", "bytes", "kernel", "why")
            rows = [
                (row["collective"], row["ranks"], row["nbytes"], f"{row['algorithm']}/{row['protocol']}", row["reason"])
                for row in value
            ]
            yield from text_table.lines(header, rows, right=("ranks", "bytes"))
        elif section != "ranges":
            yield section
            yield from _nested(_readable(value, "") if section == "limits" else value, 1)


def ranges(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each distinct choice; collectives and world sizes with the same choice share a line."""
    by_call: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_call.setdefault((row["collective"], row["ranks"]), []).append(row)
    by_choice: dict[tuple[str, str], dict[str, list[int]]] = {}
    for (collective, ranks), chosen in by_call.items():
        tables = ", ".join(dict.fromkeys(str(row["table"]) for row in chosen))
        key = ", ".join(map(_range, chosen)), tables
        by_choice.setdefault(key, {}).setdefault(collective, []).append(ranks)
    lines = []
    for (text, tables), same in by_choice.items():
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for collective, worlds in same.items():
            by_ranks.setdefault(tuple(worlds), []).append(collective)
        for world, names in by_ranks.items():
            lines.append(f"  {', '.join(names)} of {', '.join(map(str, world))} ranks: {text} (table {tables})")
    more = len(lines) - _MOST_RANGES
    return lines if more <= 0 else [*lines[:_MOST_RANGES], f"  and {more} more: --table"]


def _range(row: dict[str, Any]) -> str:
    kernel = f"{row['algorithm']}/{row['protocol']}"
    if row["to"] is None:
        return f"any size {kernel}" if row["from"] == 1 else f"above {kernel}"
    return f"{'1 B ' if row['from'] == 1 else ''}.. {units.text(row['to'])} {kernel}"


def _readable(value: Any, name: str) -> Any:
    """`value` for people: the keys of a dict as words, and numbers whose names contain "bytes" in the largest unit that
    fits."""
    if isinstance(value, dict):
        words = {key: key.replace("_", " ").replace("bytes", "").replace("  ", " ").strip() for key in value}
        return {words[key] or "size": _readable(inner, name + key) for key, inner in value.items()}
    if "bytes" not in name or not isinstance(value, int):
        return value
    unit, word = next(((u, w) for u, w in units.BINARY if value >= u), (1, "B"))
    return f"{value / unit:.4g} {word}"


def _brief(value: Any) -> str:
    """One line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_brief(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        cells = [cell for row in value for cell in row if cell is not None]
        return "every pair" if all(cells) else f"{sum(map(bool, cells))} of {len(cells)} pairs"
    if isinstance(value, list):
        own = ("index", "uuid", "remote")  # fields that differ between equal devices
        texts = [_brief({n: v for n, v in x.items() if n not in own} if isinstance(x, dict) else x) for x in value]
        counts = {text: texts.count(text) for text in texts}
        return "; ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items()) or "none"
    return str(value)


def _nested(value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    if isinstance(value, dict):
        if not value:
            return [pad + "none"]
        lines = []
        for name, inner in value.items():
            nested = isinstance(inner, dict | list)
            lines += [f"{pad}{name}", *_nested(inner, depth + 1)] if nested else [f"{pad}{name:<22} {inner}"]
        return lines
    if isinstance(value, list):
        if value and all(isinstance(row, list) for row in value):
            cells = {True: "yes", False: " no", None: "  -"}
            return [pad + " ".join(cells.get(cell, str(cell)) for cell in row) for row in value]
        return [line for item in value for line in _nested(item, depth)] or [pad + "none"]
    return [f"{pad}{value}"]
