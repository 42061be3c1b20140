"""The shape of a unit, for which code is generated."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True, slots=True)
class UnitShape:
    """Units of `lanes` threads; the last warp of a block may have fewer than others, and then has another shape.

    warp      the unit is a warp, else the whole block
    threads   of a block, (x, y, z)
    """

    lanes: int
    warp: bool
    threads: tuple[int, int, int]

    @property
    def flat(self) -> bool:
        return self.threads[1] == self.threads[2] == 1
