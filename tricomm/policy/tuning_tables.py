"""Tuning tables, which give the kernel and its launch shape by size; and their JSON form.

The shipped tables are rules for kinds of machines. A tuned table is used only on the kind of machine on which it was
measured. A user's file may have any content, so it is checked against these classes and against limits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from typing import Any

from tricomm import typed_json
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels.collectives import registry
from tricomm.kernels.layout import MAX_BLOCKS, MAX_WORLD_SIZE

KERNELS = 4  # counts changes of the kernels that invalidate old measurements
MAX_BYTES = 4 << 20  # of a file: thousands of rows
_SCHEMA = 2
_MOST_TEXT = 256
_EPILOGUE = re.compile(r"(norm|fp8|fp8_per_token|nvfp4)@[1-9][0-9]{0,5}")
_LIMITS: dict[str, Sequence[Any]] = {  # of a user's row
    "world_size": range(1, MAX_WORLD_SIZE + 1),
    "max_bytes": range(1 << 62),
    "min_bytes": range(1 << 62),
    "mode": ("eager", "graph"),
    "bits": (8, 16, 32, 64),
    "blocks": range(1, MAX_BLOCKS + 1),
    "warps": (1, 2, 4, 8, 16, 32),
    "tile": range(2, (1 << 20) + 1),
    "registers": (128, 255),
    "wire": registry.WIRES,
}


def epilogue_name(hidden: int, quantize: str) -> str:
    """`norm@8192`: an all_reduce_rms_norm of rows of `hidden` elements; `fp8@8192` if it quantises."""
    return f"{quantize or 'norm'}@{hidden}"


@dataclass(frozen=True)
class TableRow:
    """The kernel for up to `world_size` ranks and `min_bytes` to `max_bytes` bytes of input per rank (None: any).

    `mode` (eager or graph), `bits` (of an element that is reduced), `beside` (whether the group's calls overlap other
    kernels), `wire` (of groups with that option) and `epilogue` (`epilogue_name`, of an all_reduce_rms_norm) narrow it,
    if they are given. `zero_copy`: for calls over symmetric handles, and for no others. `blocks`, `warps`, `tile`
    (64-bit words; under `ll128` of 128 bits) and `registers` (a thread, at most) are the shape of the launch; None
    leaves it to selection.
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
    registers: int | None = None
    beside: bool | None = None
    epilogue: str | None = None
    zero_copy: bool = False
    min_bytes: int = 0
    wire: str | None = None

    def __post_init__(self) -> None:
        kernel = registry.find(self.collective, self.algorithm, self.protocol, self.zero_copy)
        if self.epilogue is not None and kernel not in registry.FUSED:
            raise InvalidArgument(f"{self.collective} has no epilogue {self.epilogue}")
        if kernel.wire not in ("", self.wire):
            raise InvalidArgument(f"{self.algorithm} is for groups with wire {kernel.wire}, not {self.wire}")
        if self.tile is not None and self.tile & (self.tile - 1):
            raise InvalidArgument(f"tile {self.tile} is no power of two")
        if self.max_bytes is not None and self.min_bytes > self.max_bytes:
            raise InvalidArgument(f"min_bytes {self.min_bytes} is over max_bytes {self.max_bytes}")

    @property
    def sizes(self) -> str:
        """The sizes that it covers, in words."""
        if self.max_bytes is None:
            return f"from {self.min_bytes} bytes on" if self.min_bytes else "any size"
        return f"{self.min_bytes} to {self.max_bytes} bytes" if self.min_bytes else f"up to {self.max_bytes} bytes"

    @property
    def group(self) -> tuple[str, int | None, str | None, bool | None, str | None, bool, str | None]:
        """The key of a row's group. The rows of one group, which cover all sizes, are compared and replaced
        together."""
        return self.collective, self.bits, self.mode, self.beside, self.epilogue, self.zero_copy, self.wire


@dataclass(frozen=True)
class ShippedTable:
    """Rows for `device` (cpu, an architecture like sm_90, or cuda for any) and, if given, for one topology."""

    name: str
    device: str
    rows: tuple[TableRow, ...]
    topology: str | None = None


def read_table(name: str) -> bytes:
    """A shipped table. Raises `ResourceError` if it cannot be read."""
    try:
        return files("tricomm").joinpath(f"tables/{name}.json").read_bytes()
    except OSError as error:
        raise ResourceError(f"tricomm's table {name}.json cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Fingerprint:
    """A kind of box: its devices, and how they are linked (`Topology.kind` and `digest`; empty: unknown)."""

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
class TunedTable:
    """Measured rows for one kind of box."""

    fingerprint: Fingerprint
    rows: tuple[TableRow, ...]
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.world_size != self.fingerprint.world_size:
                raise InvalidArgument(f"a row for {row.world_size} ranks, a table for {self.fingerprint.world_size}")

    @property
    def simulated(self) -> bool:
        """Whether the times were measured on a CPU, in Triton's interpreter; then only ranks on a CPU use the table."""
        return self.fingerprint.device == "cpu"

    @property
    def name(self) -> str:
        """Its name in `explain`."""
        return f"tuned {self.fingerprint.digest}{' (simulated)' if self.simulated else ''}"

    @property
    def digest(self) -> bytes:
        """32 bytes, equal on two ranks only if both choose by the same name and the same rows."""
        return _digest([self.name, [asdict(row) for row in self.rows]]).digest()


def shipped(text: bytes) -> tuple[ShippedTable, ...]:
    """The shipped tables in `text`. Not checked here: a test holds our own file to the limits of a user's."""
    tables = json.loads(text)["tables"]
    return tuple(ShippedTable(**{**table, "rows": tuple(TableRow(**row) for row in table["rows"])}) for table in tables)


def _digest(values: Any) -> hashlib._Hash:
    """Uses only the standard library, so that ranks with different packages get the same digest."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True)
class _TunedFile:
    """The JSON form of a `TunedTable`. `simulated` shows readers that the device is a CPU."""

    schema: int
    kernels: int
    fingerprint: Fingerprint
    simulated: bool
    rows: tuple[TableRow, ...]
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def dumps(table: TunedTable) -> bytes:
    """JSON for `loads`, with one row per line."""
    box = _given(table.fingerprint)
    file = _TunedFile(_SCHEMA, KERNELS, table.fingerprint, table.simulated, (), table.date, dict(table.versions))
    head = _encoded({**_given(file), "fingerprint": box})
    lines = ",\n    ".join(_encoded(_given(row)) for row in table.rows)
    return (head.replace('"rows":[]', f'"rows": [\n    {lines}\n]', 1) + "\n").encode()


def _given(record: Any) -> dict[str, Any]:
    """The fields of `record` that do not have their default value."""
    values = {f.name: (f, getattr(record, f.name)) for f in fields(record)}
    return {name: value for name, (f, value) in values.items() if value != f.default and value != {}}


def _encoded(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def loads(text: bytes, where: str) -> TunedTable:
    """The tuned table in JSON `text`. Raises `InvalidArgument` that names `where` and the mistake."""
    if len(text) > MAX_BYTES:
        raise InvalidArgument(f"{where}: more than {MAX_BYTES} bytes; no tuning table is so long")
    try:
        file = typed_json.decode(text, _TunedFile, strict=True)
        _check(file)
        table = TunedTable(file.fingerprint, file.rows, file.date, file.versions)
    except ValueError as error:
        raise InvalidArgument(f"{where}: not a tuning table: {error}") from None
    if file.kernels != KERNELS:
        raise InvalidArgument(f"{where}: measured with kernels {file.kernels}, these are {KERNELS}; tune again")
    if file.simulated != table.simulated:
        times = "simulated" if file.simulated else "measured"
        device = table.fingerprint.device
        raise InvalidArgument(f"{where}: {times} times for device {device!r}: only a CPU's are simulated")
    return table


def _check(file: _TunedFile) -> None:
    """Raises `InvalidArgument` for a value that no tuned table has."""
    if file.schema != _SCHEMA:
        raise InvalidArgument(f"schema {file.schema}, this tricomm knows {_SCHEMA}")
    box = file.fingerprint
    _check_limits(box, "fingerprint")
    for word in (box.device, box.gpu, box.topology, box.links, file.date, *file.versions, *file.versions.values()):
        if len(word) > _MOST_TEXT:
            raise InvalidArgument(f"a text of {len(word)} characters; {_MOST_TEXT} are the most")
    for at, row in enumerate(file.rows):
        check_row(row, f"rows[{at}]")


def check_row(row: TableRow, place: str) -> None:
    """Raises `InvalidArgument` that names `place` for a value that no row has."""
    _check_limits(row, place)
    if row.epilogue is not None and not _EPILOGUE.fullmatch(row.epilogue):
        raise InvalidArgument(f"{place}: epilogue {row.epilogue!r} is not like norm@8192")


def _check_limits(record: Any, place: str) -> None:
    for name, allowed in _LIMITS.items():
        value = getattr(record, name, None)
        if value is not None and value not in allowed:
            known = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
            raise InvalidArgument(f"{place}: {name} {value!r} is not one of {known}")
