"""What tuning tables say: which kernel, of which shape, up to how many bytes.

The shipped tables are rules for kinds of boxes; a tuned one was measured on one kind of box and is for no other. This
needs nothing but the standard library, so that selection runs from a bare checkout; a user's file, which may hold
anything, is read by `table_file`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry


@dataclass(frozen=True)
class Row:
    """For up to `world_size` ranks and `max_bytes` bytes of input per rank (None: any), this kernel.

    `mode` (eager or graph) and `bits` (of an element that is reduced) narrow it, where they are given. `blocks`,
    `warps` and `tile` (64-bit words) are the shape of the launch; None leaves it to selection.
    """

    collective: str
    world_size: int
    max_bytes: int | None
    algorithm: str
    protocol: str
    mode: str | None = None
    bits: int | None = None
    blocks: int | None = None
    warps: int | None = None
    tile: int | None = None

    def __post_init__(self) -> None:
        registry.find(self.collective, self.algorithm, self.protocol)
        if self.tile is not None and self.tile & (self.tile - 1):
            raise InvalidArgument(f"tile {self.tile} is no power of two")

    @property
    def group(self) -> tuple[str, int | None, str | None]:
        """What rows are compared and replaced by, all sizes together."""
        return self.collective, self.bits, self.mode


@dataclass(frozen=True)
class Table:
    """Rows for `device` (cpu, an architecture like sm_90, or cuda for any) and, where given, for one topology."""

    name: str
    device: str
    rows: tuple[Row, ...]
    topology: str | None = None


@dataclass(frozen=True)
class Fingerprint:
    """A kind of box: what its ranks run on, and how they are linked (`Topology.kind` and `digest`; empty: unknown)."""

    device: str
    gpu: str
    world_size: int
    topology: str = ""
    links: str = ""

    @property
    def digest(self) -> str:
        """12 hexadecimal digits."""
        return _digest(asdict(self)).hexdigest()[:12]

    def __str__(self) -> str:
        links = f", {self.topology}" if self.topology else ""
        return f"{self.world_size} ranks on {self.gpu or self.device} ({self.device}{links})"


@dataclass(frozen=True)
class Tuned:
    """Measured rows for one kind of box."""

    fingerprint: Fingerprint
    rows: tuple[Row, ...]
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.world_size != self.fingerprint.world_size:
                raise InvalidArgument(f"a row for {row.world_size} ranks, a table for {self.fingerprint.world_size}")

    @property
    def simulated(self) -> bool:
        """A CPU's times are those of Triton's interpreter, and for it alone."""
        return self.fingerprint.device == "cpu"

    @property
    def name(self) -> str:
        """What `explain` calls it."""
        return f"tuned {self.fingerprint.digest}{' (simulated)' if self.simulated else ''}"

    @property
    def digest(self) -> bytes:
        """32 bytes that differ where two ranks would choose differently."""
        return _digest([self.name, [asdict(row) for row in self.rows]]).digest()


def shipped(text: bytes) -> tuple[Table, ...]:
    """The tables that come with tricomm. Our own file: a test, not this, holds it to what a user's must keep to."""
    found = json.loads(text)["tables"]
    return tuple(Table(**{**table, "rows": tuple(Row(**row) for row in table["rows"])}) for table in found)


def _digest(values: Any) -> hashlib._Hash:
    """By the standard library, so that ranks with other packages installed come to the same."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())
