"""A user's own tuning table as JSON, with a schema that is checked when it is read.

Apart from `table`, and imported only where such a file is read or written: what a user's file may hold needs msgspec,
what tricomm ships does not.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec

from tricomm.errors import InvalidArgument
from tricomm.kernels.layout import MAX_BLOCKS, MAX_WORLD_SIZE
from tricomm.policy.tables import Fingerprint, Row, Tuned

KERNELS = 2  # counts changes of the kernels that make old measurements void
MAX_BYTES = 4 << 20  # of a file: thousands of rows
_MAX_TILE = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    def __post_init__(self) -> None:
        self.checked()  # here, so that what it refuses is told with its place in the file

    def checked(self) -> Any:
        """The same as `table` has it. Raises `InvalidArgument`."""
        raise NotImplementedError


class FileRow(_Strict, frozen=True):
    """Limits of a `Row`."""

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

    def checked(self) -> Row:
        return Row(**msgspec.structs.asdict(self))


class _Fingerprint(_Strict, frozen=True):
    device: _Text
    gpu: _Text
    world_size: _Ranks
    topology: _Text = ""
    links: _Text = ""

    def checked(self) -> Fingerprint:
        return Fingerprint(**msgspec.structs.asdict(self))


class _Tuned(_Strict, frozen=True):
    """`simulated` is said beside the device, for whoever reads the file."""

    schema: Literal[2]
    kernels: int
    fingerprint: _Fingerprint
    simulated: bool
    rows: tuple[FileRow, ...]
    date: _Text = ""
    versions: dict[_Text, _Text] = {}

    def checked(self) -> Tuned:
        rows = tuple(row.checked() for row in self.rows)
        found = Tuned(self.fingerprint.checked(), rows, self.date, self.versions)
        if self.simulated != found.simulated:
            times = "simulated" if self.simulated else "measured"
            raise InvalidArgument(f"{times} times for device {found.fingerprint.device!r}: only a CPU's are simulated")
        return found


def dumps(table: Tuned) -> bytes:
    """JSON that `loads` takes back, a row a line."""
    box = _Fingerprint(**asdict(table.fingerprint))
    head = msgspec.json.encode(_Tuned(2, KERNELS, box, table.simulated, (), table.date, dict(table.versions)))
    lines = b",\n    ".join(msgspec.json.encode(FileRow(**asdict(row))) for row in table.rows)
    return head.replace(b'"rows":[]', b'"rows": [\n    ' + lines + b"\n]", 1) + b"\n"


def loads(text: bytes, where: str) -> Tuned:
    """The tuned table in JSON `text`. Raises `InvalidArgument` that says what is wrong with `where`."""
    if len(text) > MAX_BYTES:
        raise InvalidArgument(f"{where}: more than {MAX_BYTES} bytes; no tuning table is so long")
    try:
        found = msgspec.json.decode(text, type=_Tuned)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not a tuning table: {error}") from None
    if found.kernels != KERNELS:
        raise InvalidArgument(f"{where}: measured with kernels {found.kernels}, these are {KERNELS}; tune again")
    return found.checked()
