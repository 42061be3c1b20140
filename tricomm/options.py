"""What a user may set on a communicator. All but the timeouts must be the same on all ranks; the rendezvous compares
them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from tricomm import env, gone
from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.policy.compact_forms import BESIDE_BLOCKS, COMPACT_REGISTERS, MOST_REGISTERS
from tricomm.topology.model import Topology

_LONGEST = 365 * 86400.0  # seconds; the system's own waits overflow some time later


@dataclass(frozen=True)
class Options:
    """Settings of one communicator.

    timeout        seconds that a call may take before `CollectiveTimeout`; also the limit of the rendezvous
    stall_timeout  seconds without a sign of life from a peer, while it is needed, before `PeerStalled`
    arena_bytes    memory per rank that peers can reach: headers and mailboxes; longer messages go in chunks
    max_blocks     upper limit of a kernel's grid, of NCCL's, too; None: what is surely resident at once
    max_registers  upper limit of a kernel's registers a thread, 128 or more: below 255 only kernels that have a compact
                   form are chosen (docs/tuning.md, beside other work); None: 255
    beside_compute whether calls run beside other kernels, such as a matrix product, and leave them room: table rows
                   for that, 128 registers, and 16 blocks unless `max_registers` and `max_blocks` say otherwise
    blocks, tile   force the grid and the 64-bit words per tile of every kernel (tuning and tests); refused if more
                   blocks than are surely resident, or if a kernel cannot use the tile. A message has at most
                   one block a queue
    first_epoch    epoch of the first call (tests start near the limits)
    topology       how the ranks' devices are linked, by rank, or a file that says so; None: read from the machine
    share_device   whether ranks may share a GPU, and take turns on it (tests, looking at kernels; not for speed)
    nccl           whether NCCL serves what the kernels do not, on GPUs; without it such calls and groups are refused
    batch_invariant  whether the bits of a reduction depend on rank order alone: not on size, place in the tensor,
                   algorithm, protocol, chunk, grid or graph. A call without that promise is refused. Also for all
                   groups of a process: TRICOMM_BATCH_INVARIANT=1 (docs/batch-invariance.md)

    Raises `InvalidArgument` for a value out of range, and for an option that is gone (`tricomm.gone`).
    """

    timeout: float = 600.0
    stall_timeout: float = 30.0
    arena_bytes: int = 64 * 1024 * 1024
    max_blocks: int | None = None
    max_registers: int | None = None
    beside_compute: bool = False
    blocks: int | None = None
    tile: int | None = None
    first_epoch: int = 1
    topology: Topology | None = None
    nccl: bool = True
    share_device: bool = False
    batch_invariant: bool = False

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        gone.refuse(*(f"Options({name})" for name in settings))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.topology, str | Path):
            object.__setattr__(self, "topology", Topology.load(self.topology))
        if not isinstance(self.topology, Topology | None):
            raise InvalidArgument(f"Options.topology={self.topology!r}: a Topology, or a file of one, is needed")
        for name in ("nccl", "share_device", "batch_invariant", "beside_compute"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"Options.{name}={getattr(self, name)!r}: True or False is needed")
        for name in ("timeout", "stall_timeout"):
            object.__setattr__(self, name, seconds(getattr(self, name), f"Options.{name}"))
        self._whole("arena_bytes", layout.MIN_ARENA, 1 << 40)
        self._whole("max_blocks", 1, layout.MAX_BLOCKS)
        self._whole("max_registers", COMPACT_REGISTERS, MOST_REGISTERS)
        if self.beside_compute:
            object.__setattr__(self, "max_blocks", self.max_blocks or BESIDE_BLOCKS)
            object.__setattr__(self, "max_registers", self.max_registers or COMPACT_REGISTERS)
        self._whole("blocks", 1, layout.MAX_BLOCKS)
        self._whole("tile", 2, 1 << 20)
        self._whole("first_epoch", 1, layout.EPOCH_LIMIT - 1)
        if self.tile is not None and self.tile & (self.tile - 1):
            raise InvalidArgument(f"Options.tile={self.tile!r}: a power of two is needed")

    def agreed(self, arena: layout.Layout, device: str) -> int:
        """A number that differs if two ranks' memory or settings do not fit together."""
        return zlib.crc32(repr((arena.digest, device, replace(self, timeout=1.0, stall_timeout=1.0))).encode())

    def _whole(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if value is None and name in ("max_blocks", "max_registers", "blocks", "tile"):
            return
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidArgument(f"Options.{name}={value!r}: an integer from {least} to {most} is needed")


def with_environment(options: Options | None) -> Options:
    """`options`, or the defaults, with what the environment asks of every group: TRICOMM_BATCH_INVARIANT."""
    options = options or Options()
    return replace(options, batch_invariant=True) if env.batch_invariant() else options


def seconds(value: float | timedelta, name: str) -> float:
    """`value` in seconds; raises `InvalidArgument` unless it is a positive number or timedelta, of a year at most."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= _LONGEST:
        raise InvalidArgument(
            f"{name}={value!r}: a positive number of seconds (or a timedelta) is needed, a year at most"
        )
    return float(number)
