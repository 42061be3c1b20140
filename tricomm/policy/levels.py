"""Whether an all_reduce goes in two levels: through fast memory inside each part of a group, and across between parts.

A part is a node, or an island of fast links on one node. Pure, like all of this package: all ranks know the same
parts, and the same bytes of a call.

    shards    reduce_scatter inside, all_reduce of each shard between the ranks of equal position, all_gather inside
    leaders   reduce inside to the first rank of each part, all_reduce between these, broadcast inside
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

NODES, ISLANDS = "nodes", "islands"
TWO_LEVEL = "two_level"
FORMS = ("shards", "leaders")


@dataclass(frozen=True)
class Parts:
    """Which part of a group each rank is in: `of[rank]`, numbered as the parts first appear. `between` says what they
    are: nodes, or islands."""

    of: tuple[int, ...]
    between: str = NODES

    @classmethod
    def by(cls, names: Sequence[object], between: str = NODES) -> Parts:
        """Ranks with equal names are in one part."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names), between)

    @property
    def count(self) -> int:
        """How many parts there are."""
        return max(self.of) + 1

    @property
    def size(self) -> int:
        """Ranks of the first part; of each, unless `uneven`."""
        return self.of.count(0)

    def members(self, part: int) -> list[int]:
        """The ranks of a part, in ascending order."""
        return [rank for rank, other in enumerate(self.of) if other == part]

    def position(self, rank: int) -> int:
        """The number of `rank` in its part."""
        return self.of[:rank].count(self.of[rank])

    def column(self, rank: int) -> list[int]:
        """The ranks that have the position of `rank` in their parts, by part."""
        position, seen, column = self.position(rank), Counter[int](), []
        for other, part in enumerate(self.of):
            if seen[part] == position:
                column.append((part, other))
            seen[part] += 1
        return [other for _, other in sorted(column)]

    def named(self, part: int) -> str:
        """A part and its ranks, in words."""
        return f"{self.between[:-1]} {part} (rank(s) {', '.join(map(str, self.members(part)))})"

    def why_not(self, most: int) -> str | None:
        """Why there are no two levels, or None; at most `most` ranks of a part can share memory."""
        sizes = sorted(set(Counter(self.of).values()))
        if self.count < 2:
            return f"all ranks are on one of the {self.between}"
        if len(sizes) > 1:
            return f"the {self.between} have other numbers of ranks: {', '.join(map(str, sizes))}"
        if self.size < 2:
            return f"the {self.between} have one rank each"
        if self.size > most:
            return f"the {self.between} have {self.size} ranks each, and the kernels take up to {most}"
        return None


@dataclass(frozen=True)
class LevelForm:
    """A form of two levels, or None for none, and the row of the table that says so."""

    form: str | None
    reason: str


def choose(device: str, between: str, nbytes: int) -> LevelForm:
    """The form of an all_reduce of `nbytes` bytes of input per rank, by `tables/levels.json`."""
    for number, row in enumerate(_rows()):
        limit = row["max_bytes"]
        if (row["device"], row["between"]) == (device, between) and (limit is None or nbytes <= limit):
            size = "any size" if limit is None else f"up to {limit} bytes"
            return LevelForm(row["form"], f"table 'levels' row {number}: {between}, {size}")
    return LevelForm(None, "table 'levels' has no row for it")


def limits(device: str, between: str) -> list[int]:
    """The sizes in bytes at which a row for this device ends."""
    return sorted(
        row["max_bytes"]
        for row in _rows()
        if (row["device"], row["between"]) == (device, between) and row["max_bytes"] is not None
    )


@cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(files("tricomm").joinpath("tables/levels.json").read_text())["rows"]
    return rows
