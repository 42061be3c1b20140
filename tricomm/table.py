"""The form of a tuning table: which kernel, of which shape, up to how many bytes.

JSON, with a schema that is checked when it is read. The shipped tables are rules for kinds of boxes; a tuned one was
measured on one kind of box and is for no other.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec

from tricomm.errors import InvalidArgument
from tricomm.kernels import registry
from tricomm.kernels.layout import MAX_BLOCKS, MAX_WORLD_SIZE

SCHEMA = 2  # of the JSON
KERNELS = 2  # counts changes of the kernels that make old measurements void
MAX_BYTES = 4 << 20  # of a file: thousands of rows
_MAX_TILE = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Row(_Strict, frozen=True):
    """For up to `world_size` ranks and `max_bytes` bytes of input per rank (None: any), this kernel.

    `mode` (eager or graph) and `bits` (of an element that is reduced) narrow it, where they are given. `blocks`,
    `warps` and `tile` (64-bit words) are the shape of the launch; None leaves it to selection.
    """

    collective: str
    world_size: _Ranks
    max_bytes: _Count | None
    algorithm: str
    protocol: str
    mode: Literal["eager", "graph"] | None = None
    bits: Literal[8, 16, 32, 64] | None = None
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)] | None = None
    warps: Literal[1, 2, 4, 8, 16, 32] | None = None
    tile: Annotated[int, msgspec.Meta(ge=2, le=_MAX_TILE)] | None = None

    def __post_init__(self) -> None:
        registry.find(self.collective, self.algorithm, self.protocol)
        if self.tile is not None and self.tile & (self.tile - 1):
            raise InvalidArgument(f"tile {self.tile} is no power of two")

    @property
    def group(self) -> tuple[str, int | None, str | None]:
        """What rows are compared and replaced by, all sizes together."""
        return self.collective, self.bits, self.mode


class Table(_Strict, frozen=True):
    """Rows for `device` (cpu, an architecture like sm_90, or cuda for any) and, where given, for one topology."""

    name: str
    device: str
    rows: tuple[Row, ...]
    topology: str | None = None


class Shipped(_Strict, frozen=True):
    """The tables that come with tricomm, the first that fits counts."""

    schema: Literal[2]
    version: int
    source: str
    tables: tuple[Table, ...]


class Fingerprint(_Strict, frozen=True):
    """A kind of box: what its ranks run on, and how they are linked (`Topology.kind` and `digest`; empty: unknown)."""

    device: _Text
    gpu: _Text
    world_size: _Ranks
    topology: _Text = ""
    links: _Text = ""

    @property
    def digest(self) -> str:
        """12 hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]

    def __str__(self) -> str:
        links = f", {self.topology}" if self.topology else ""
        return f"{self.world_size} ranks on {self.gpu or self.device} ({self.device}{links})"


class Tuned(_Strict, frozen=True):
    """Measured rows for one kind of box. `simulated` ones were timed under Triton's interpreter, and are for it."""

    schema: Literal[2]
    kernels: int
    fingerprint: Fingerprint
    simulated: bool
    rows: tuple[Row, ...]
    date: _Text = ""
    versions: dict[_Text, _Text] = {}

    def __post_init__(self) -> None:
        if self.simulated != (self.fingerprint.device == "cpu"):
            found = "simulated" if self.simulated else "measured"
            raise InvalidArgument(f"{found} times for device {self.fingerprint.device!r}: only a CPU's are simulated")
        for row in self.rows:
            if row.world_size != self.fingerprint.world_size:
                raise InvalidArgument(f"a row for {row.world_size} ranks, a table for {self.fingerprint.world_size}")

    @property
    def name(self) -> str:
        """What `explain` calls it."""
        return f"tuned {self.fingerprint.digest}{' (simulated)' if self.simulated else ''}"

    @property
    def digest(self) -> bytes:
        """32 bytes that differ where two ranks would choose differently."""
        return hashlib.sha256(msgspec.json.encode((self.name, self.rows))).digest()


def make(
    fingerprint: Fingerprint, rows: tuple[Row, ...], date: str = "", versions: dict[str, str] | None = None
) -> Tuned:
    """A table of today's form."""
    simulated = fingerprint.device == "cpu"
    return Tuned(SCHEMA, KERNELS, fingerprint, simulated, rows, date, versions or {})  # type: ignore[arg-type]


def dumps(table: Tuned) -> bytes:
    """JSON that `loads` takes back, a row a line."""
    head, rows = msgspec.json.encode(msgspec.structs.replace(table, rows=())), table.rows
    lines = b",\n    ".join(msgspec.json.encode(row) for row in rows)
    return head.replace(b'"rows":[]', b'"rows": [\n    ' + lines + b"\n]", 1) + b"\n"


def loads(text: bytes, where: str) -> Tuned:
    """The tuned table in JSON `text`. Raises `InvalidArgument` that says what is wrong with `where`."""
    found: Tuned = _decode(text, Tuned, where)
    if found.kernels != KERNELS:
        raise InvalidArgument(f"{where}: measured with kernels {found.kernels}, these are {KERNELS}; tune again")
    return found


def shipped(text: bytes, where: str) -> tuple[Table, ...]:
    """The tables that come with tricomm. Raises `InvalidArgument`."""
    found: Shipped = _decode(text, Shipped, where)
    return found.tables


def _decode(text: bytes, kind: Any, where: str) -> Any:
    if len(text) > MAX_BYTES:
        raise InvalidArgument(f"{where}: more than {MAX_BYTES} bytes; no tuning table is so long")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not a tuning table: {error}") from None
