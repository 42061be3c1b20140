"""Tuned tables: made from decisions, merged, and printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tricomm.errors import InvalidArgument
from tricomm.perf import text_table
from tricomm.perf.tuner.points import PointGroup
from tricomm.perf.tuner.search import Decision
from tricomm.policy.tuning_tables import TableRow, TunedTable


def rows(decisions: Sequence[Decision], world_size: int) -> list[TableRow]:
    """Rows of all decisions. A row ends at the geometric mean of its size and the next; equal neighbours share one.

    There is no row for messages below the smallest size or above the largest one, because they were not measured.
    """
    made: list[TableRow] = []
    for group in _groups(decisions):
        least = group[0].point.nbytes
        for here, larger in zip(group, [*group[1:], None], strict=True):
            if larger is not None and larger.chosen == here.chosen:
                continue
            limit = here.point.nbytes if larger is None else math.isqrt(here.point.nbytes * larger.point.nbytes)
            made.append(here.chosen.row(here.point, world_size, limit, least))
            least = limit + 1
    return made


def replaced(old: Sequence[TableRow], new: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """`new`, and the parts of `old` that `new` does not cover: other collectives, widths and modes, and smaller or
    larger messages."""
    kept = []
    for row in (replace(row, min_bytes=least) for least, row in _ranges(old)):
        same = [other for other in new if other.group == row.group]
        if not same:
            kept.append(row)
            continue
        least = min(other.min_bytes for other in same)
        most = max(math.inf if other.max_bytes is None else other.max_bytes for other in same)
        end = math.inf if row.max_bytes is None else row.max_bytes
        if row.min_bytes < least:
            kept.append(replace(row, max_bytes=int(min(end, least - 1))))
        if end > most:
            kept.append(replace(row, min_bytes=max(row.min_bytes, int(most) + 1)))
    return (*kept, *new)


def merge(tables: Sequence[TunedTable]) -> TunedTable:
    """One table; a later one replaces rows of its collective, width and mode in the sizes that it covers.

    Raises `InvalidArgument` for tables of different kinds of boxes.
    """
    first = tables[0]
    merged: tuple[TableRow, ...] = ()
    for table in tables:
        if table.fingerprint != first.fingerprint:
            raise InvalidArgument(
                f"tables of different boxes cannot be merged: {first.fingerprint}; {table.fingerprint}"
            )
        merged = replaced(merged, table.rows)
    return TunedTable(first.fingerprint, merged, tables[-1].date, tables[-1].versions)


def decision_lines(decisions: Sequence[Decision], asked: int, simulated: bool) -> list[str]:
    """The decisions that change, with the expected gain of each, and a summary of all of the `asked` ones."""
    mark = "simulated: " if simulated else ""
    lines = []
    for d in sorted(decisions, key=lambda d: (d.point.group, d.point.nbytes)):
        if d.changed:
            lines.append(f"{mark}{d.point.name}: {d.in_force} -> {d.best}")
            lines.append(f"    {d.in_force_us:.2f} -> {d.time_us:.2f} us, saves {d.gain}")
    changed = [d for d in decisions if d.changed]
    measured = sum(d.measured for d in decisions)
    lines.append(f"{mark}{len(changed)} of {len(decisions)} decisions change, {measured} samples")
    if changed:
        saved = sum(d.gain.expected for d in changed) / len(changed)
        lines[-1] += f"; those that change save {saved:.1%} on average"
    if asked > len(decisions):
        lines.append(
            f"{asked - len(decisions)} of {asked} points were not reached; a larger --budget goes on from here"
        )
    return lines


def table_lines(file: Path, table: TunedTable) -> list[str]:
    """A table as text: its kind of machine, and its rows."""
    versions = ", ".join(f"{name} {value}" for name, value in table.versions.items())
    mark = ", simulated: no GPU uses it" if table.simulated else ""
    head = [f"{file}", f"    {table.fingerprint}{mark}", f"    {table.date or 'no date'}; {versions or 'no versions'}"]
    header = ("row", "collective", "element", "mode", "bytes", "kernel")
    cells = [(number, *_cells(least, row)) for number, (least, row) in enumerate(_ranges(table.rows))]
    return head + text_table.lines(header, cells, right=("row", "bytes"), indent=4)


def _cells(least: int, row: TableRow) -> tuple[str, ...]:
    limit = "any" if row.max_bytes is None else str(row.max_bytes)
    kernel = f"{row.algorithm}/{row.protocol} {row.blocks or '-'}x{row.warps or '-'} tile {row.tile or '-'}"
    kernel += f", {row.registers} registers" if row.registers else ""
    return (
        row.collective,
        " ".join(word for word in (f"{row.bits} bit" if row.bits else "", row.epilogue, row.wire) if word),
        f"{row.mode or ''}{' beside' if row.beside else ''}",
        f"{least} to {limit}",
        kernel,
    )


def _ranges(table: Sequence[TableRow]) -> Iterator[tuple[int, TableRow]]:
    """Rows, each with its `min_bytes`. Older tables do not contain it; there it follows from the previous row."""
    ends: dict[tuple[object, ...], int] = {}
    for row in table:
        yield row.min_bytes or ends.get(row.group, 0), row
        ends[row.group] = (row.max_bytes or 0) + 1


def _groups(decisions: Sequence[Decision]) -> list[list[Decision]]:
    groups: dict[PointGroup, list[Decision]] = {}
    for decision in sorted(decisions, key=lambda d: d.point.nbytes):
        groups.setdefault(decision.point.group, []).append(decision)
    return list(groups.values())
