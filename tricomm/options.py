"""What a user may set on a communicator. The same on all ranks: the meeting compares it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from tricomm.errors import InvalidArgument
from tricomm.kernels import layout


@dataclass(frozen=True)
class Options:
    """Settings of one communicator.

    timeout        seconds that a call may take before `CollectiveTimeout`; also the limit of the meeting
    stall_timeout  seconds without a sign of life from a peer, while it is needed, before `PeerStalled`
    arena_bytes    memory per rank that peers can reach: headers and mailboxes; longer messages go in chunks
    max_blocks     upper limit of a kernel's grid; None: what is surely resident at once
    blocks, tile   force the grid and the 64-bit words per tile of every kernel (tuning and tests)
    first_epoch    epoch of the first call (tests start near the limits)

    Raises `InvalidArgument` for a value out of range.
    """

    timeout: float = 600.0
    stall_timeout: float = 30.0
    arena_bytes: int = 64 * 1024 * 1024
    max_blocks: int | None = None
    blocks: int | None = None
    tile: int | None = None
    first_epoch: int = 1

    def __post_init__(self) -> None:
        for name in ("timeout", "stall_timeout"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise InvalidArgument(f"Options.{name}={value!r}: a positive number of seconds is needed")
        if self.arena_bytes < layout.MIN_ARENA:
            raise InvalidArgument(
                f"Options.arena_bytes={self.arena_bytes}: at least {layout.MIN_ARENA} bytes are needed"
            )
        for name in ("max_blocks", "blocks"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= layout.MAX_BLOCKS:
                raise InvalidArgument(f"Options.{name}={value!r}: 1 to {layout.MAX_BLOCKS} blocks are possible")
        if self.tile is not None and (self.tile < 2 or self.tile & (self.tile - 1)):
            raise InvalidArgument(f"Options.tile={self.tile!r}: a power of two of at least 2 words is needed")
        if not 1 <= self.first_epoch < layout.EPOCH_LIMIT:
            raise InvalidArgument(f"Options.first_epoch={self.first_epoch}: 1 to 2^32 - 1 is possible")


def seconds(value: float | timedelta, name: str) -> float:
    """`value` in seconds; raises `InvalidArgument` unless it is a positive, finite number or timedelta."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number <= 0:
        raise InvalidArgument(f"{name}={value!r}: a positive number of seconds (or a timedelta) is needed")
    return float(number)
