"""A request for a tuning run, checked before anything is started."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from tricomm.perf import parsing
from tricomm.perf.tuner.points import DTYPES, TUNABLE, Point, points

MODES = ("eager", "graph")
_WIDTHS = tuple(str(bits) for bits in DTYPES)


class TuningRequest(msgspec.Struct, frozen=True):
    """`budget` and `timeout` (of a call) in seconds; an empty `modes` means all modes of the device."""

    collectives: tuple[str, ...]
    bits: tuple[int, ...]
    sizes: tuple[int, ...]
    modes: tuple[str, ...] = ()
    budget: float = 300.0
    simulated: bool = False
    device: str = "auto"
    timeout: float = 60.0

    def points(self, cpu: bool) -> list[Point]:
        """Every decision to make, on a CPU, which has no graphs, or on GPUs."""
        return points(self.collectives, self.bits, self.modes or (MODES[:1] if cpu else MODES), self.sizes)

    def key(self, *facts: object) -> str:
        """Names a run by the request and `facts`; not by the budget, because a run may continue with another one."""
        asked = (self.collectives, self.bits, self.sizes, self.modes, facts)
        return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def parse(collective: str, bits: str, sizes: str, mode: str | None, budget: str, **rest: Any) -> TuningRequest:
    """A request of comma lists (or `all`). Raises `InvalidArgument` with the nearest names."""
    return TuningRequest(
        parsing.parse_names(collective, TUNABLE, "collective"),
        tuple(int(width) for width in parsing.parse_names(bits, _WIDTHS, "bits")),
        parsing.parse_sizes(sizes),
        parsing.parse_names(mode, MODES, "mode") if mode else (),
        parsing.parse_budget(budget),
        **rest,
    )
