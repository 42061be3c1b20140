"""Tuned tables for people: shown, merged, exported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tricomm.errors import InvalidArgument
from tricomm.perf.tuner.result import merged
from tricomm.policy.tuning_tables import TableRow, TunedTable

_COLUMNS = "collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks,warps,tile_words,mode,bits"


def lines(file: Path, found: TunedTable) -> list[str]:
    """A table in words."""
    versions = ", ".join(f"{name} {value}" for name, value in found.versions.items())
    mark = ", simulated: no GPU uses it" if found.simulated else ""
    head = [f"{file}", f"    {found.fingerprint}{mark}", f"    {found.date or 'no date'}; {versions or 'no versions'}"]
    return head + [f"    {number:>3} {_line(low, row)}" for number, (low, row) in enumerate(_ranges(found.rows))]


def _line(low: int, row: TableRow) -> str:
    width = f"{row.bits} bit" if row.bits else ""
    limit = "any" if row.max_bytes is None else str(row.max_bytes)
    shape = f"{row.blocks or '-'}x{row.warps or '-'} tile {row.tile or '-'}"
    what = f"{row.collective:<14} {width:<6} {row.mode or '':<5} {low:>10} to {limit:<10}"
    return f"{what} {row.algorithm}/{row.protocol} {shape}"


def csv(found: TunedTable) -> str:
    """A row a line by ranges of sizes; an empty `max_bytes` has no end."""
    rows = [
        [row.collective, low, row.max_bytes, row.algorithm, row.protocol, row.blocks, 1, row.world_size, row.warps,
         row.tile, row.mode, row.bits]
        for low, row in _ranges(found.rows)
    ]  # fmt: skip
    return "\n".join([_COLUMNS, *(",".join("" if v is None else str(v) for v in row) for row in rows)]) + "\n"


def merge(found: Sequence[TunedTable]) -> TunedTable:
    """One table; a later one's rows replace those of the same collective, width and mode.

    Raises `InvalidArgument` for tables of different kinds of boxes.
    """
    first = found[0]
    rows: tuple[TableRow, ...] = ()
    for one in found:
        if one.fingerprint != first.fingerprint:
            raise InvalidArgument(f"tables of different boxes cannot be merged: {first.fingerprint}; {one.fingerprint}")
        rows = merged(rows, one.rows)
    return TunedTable(first.fingerprint, rows, found[-1].date, found[-1].versions)


def _ranges(rows: Sequence[TableRow]) -> Iterator[tuple[int, TableRow]]:
    """Rows with the least bytes that they decide: one more than the row before of the same kind."""
    ends: dict[tuple[object, ...], int] = {}
    for row in rows:
        yield ends.get(row.group, 0), row
        ends[row.group] = (row.max_bytes or 0) + 1
