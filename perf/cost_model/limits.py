"""What limits a call: the largest share of its modelled time.

latency          launch, the way to the first push, hops, polls, the end: what a call of one tile a block takes
bytes in flight  the further tiles of a block, one behind the other: more blocks or larger tiles shorten it
links            bytes that wait for a link
barriers         of all ranks: fences, hops, polls
memory           bytes to and from the GPU's own memory
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TimeShares:
    """Microseconds of a call by what limits it; they add up to its time."""

    latency: float = 0.0
    bytes_in_flight: float = 0.0
    links: float = 0.0
    barriers: float = 0.0
    memory: float = 0.0

    @property
    def limit(self) -> str:
        """The name of the largest share."""
        shares = asdict(self)
        return max(shares, key=lambda name: shares[name]).replace("_", " ")

    def text(self) -> str:
        """The name of the largest share, and its percentage of the time."""
        shares = asdict(self)
        return f"{self.limit} {max(shares.values()) / sum(shares.values()):.0%}"
