"""Tables for people, laid out by rich, as lines of plain text that no terminal's width folds."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDEST = 10_000  # characters a line


def lines(
    header: Sequence[str], rows: Iterable[Sequence[object]], right: Collection[str] = (), indent: int = 0, cell: int = 0
) -> list[str]:
    """A heading and a line a row, two spaces between columns. The columns named in `right` are aligned to the right.

    `indent` is the number of spaces before every line, `cell` the least width of a column.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in header:
        table.add_column(Text(name), justify="right" if name in right else "left", no_wrap=True, min_width=cell or None)
    return rendered(table, rows, indent)


def grid(rows: Iterable[Sequence[object]]) -> list[str]:
    """A line a row without a heading, one space between columns."""
    return rendered(Table.grid(padding=(0, 1, 0, 0)), rows)


def rendered(table: Table, rows: Iterable[Sequence[object]], indent: int = 0) -> list[str]:
    """The lines of `table` with `rows` added, whose cells are not taken for markup."""
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    console = Console(file=io.StringIO(), width=_WIDEST, color_system=None)
    with console.capture() as text:
        console.print(table)
    return [f"{'':{indent}}{line}".rstrip() for line in text.get().splitlines()]
