"""From decisions to a table, and in words: what changed against what was in force."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tricomm.perf.tuner.points import Point
from tricomm.perf.tuner.search import Decision
from tricomm.policy.tuning_tables import TableRow


def rows(decisions: Sequence[Decision], world_size: int) -> list[TableRow]:
    """Rows of all decisions: a size decides halfway, in doublings, to the next one; neighbours that agree share a row.

    Above the largest size nothing was measured, and nothing is said.
    """
    found: list[TableRow] = []
    for group in _groups(decisions):
        for here, beyond in zip(group, [*group[1:], None], strict=True):
            if beyond is not None and beyond.chosen == here.chosen:
                continue
            limit = here.point.nbytes if beyond is None else math.isqrt(here.point.nbytes * beyond.point.nbytes)
            found.append(here.chosen.row(here.point, world_size, limit))
    return found


def merged(old: Sequence[TableRow], new: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """`new`, and those of `old` of whose collective, width and mode it says nothing."""
    said = {row.group for row in new}
    return (*(row for row in old if row.group not in said), *new)


def lines(decisions: Sequence[Decision], asked: int, simulated: bool) -> list[str]:
    """What changed, decision by decision, and what it is expected to gain."""
    mark = "simulated: " if simulated else ""
    said = []
    for d in sorted(decisions, key=lambda d: (d.point.group, d.point.nbytes)):
        if d.changed:
            said.append(f"{mark}{_name(d.point)}: {d.in_force} -> {d.best}")
            said.append(f"    {d.in_force_us:.2f} -> {d.time_us:.2f} us, saves {d.gain}")
    changed = [d for d in decisions if d.changed]
    measured = sum(d.measured for d in decisions)
    said.append(f"{mark}{len(changed)} of {len(decisions)} decisions change, {measured} samples")
    if changed:
        saved = sum(d.gain.expected for d in changed) / len(changed)
        said[-1] += f"; those that change save {saved:.1%} on average"
    if asked > len(decisions):
        said.append(f"{asked - len(decisions)} of {asked} points were not reached; a larger --budget goes on from here")
    return said


def _groups(decisions: Sequence[Decision]) -> list[list[Decision]]:
    groups: dict[tuple[str, int, str], list[Decision]] = {}
    for decision in sorted(decisions, key=lambda d: d.point.nbytes):
        groups.setdefault(decision.point.group, []).append(decision)
    return list(groups.values())


def _name(point: Point) -> str:
    width = f" {point.bits} bit" if point.bits else ""
    return f"{point.collective}{width} {point.mode} {point.nbytes} B"
