"""What a tuning run is asked for, worked out and refused before anything is started."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from tricomm.perf import parsing
from tricomm.perf.tuner.points import DTYPES, TUNABLE, Point, points

MODES = ("eager", "graph")
_WIDTHS = tuple(str(bits) for bits in DTYPES)


class Settings(msgspec.Struct, frozen=True):
    """`budget` and `timeout` in seconds; an empty `modes` is all that the device has. `patience` is how long a rank may
    say nothing."""

    collectives: tuple[str, ...]
    bits: tuple[int, ...]
    sizes: tuple[int, ...]
    modes: tuple[str, ...] = ()
    budget: float = 300.0
    simulated: bool = False
    device: str = "auto"
    timeout: float = 60.0

    def points(self, cpu: bool) -> list[Point]:
        """Every decision to be made on a CPU, which has no graphs, or on GPUs."""
        return points(self.collectives, self.bits, self.modes or (MODES[:1] if cpu else MODES), self.sizes)

    def key(self, *facts: object) -> str:
        """Names a run: what it asks for and `facts`. Not its budget: a run may go on with another one."""
        asked = (self.collectives, self.bits, self.sizes, self.modes, facts)
        return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def settings(
    collective: str, bits: str, sizes: str, mode: str | None, budget: str, **rest: Any
) -> Settings:  # fmt: skip
    """Settings of comma lists (or `all`). Raises `InvalidArgument` with the nearest names."""
    return Settings(
        parsing.parse_names(collective, TUNABLE, "collective"),
        tuple(int(width) for width in parsing.parse_names(bits, _WIDTHS, "bits")),
        parsing.parse_sizes(sizes),
        parsing.parse_names(mode, MODES, "mode") if mode else (),
        parsing.parse_budget(budget),
        **rest,
    )
