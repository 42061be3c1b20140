"""Tuning tables: which kernel, of which shape, up to how many bytes; and their JSON form.

The shipped tables are rules for kinds of boxes; a tuned one was measured on one kind of box and is for no other. The
tables need nothing but the standard library, so that selection runs from a bare checkout. A user's file, which may
have any content, is checked by msgspec against the same classes, with limits; that is imported only then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, get_type_hints

from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels.collectives import registry
from tricomm.kernels.layout import MAX_BLOCKS, MAX_WORLD_SIZE

KERNELS = 4  # counts changes of the kernels that make old measurements void
MAX_BYTES = 4 << 20  # of a file: thousands of rows
_MAX_TILE = 1 << 20
_EPILOGUE = r"(norm|fp8|fp8_per_token|nvfp4)@[1-9][0-9]{0,5}"


def epilogue_name(hidden: int, quantize: str) -> str:
    """`norm@8192`: an all_reduce_rms_norm of rows of `hidden` elements; `fp8@8192` if it quantises."""
    return f"{quantize or 'norm'}@{hidden}"


@dataclass(frozen=True)
class TableRow:
    """For up to `world_size` ranks and `min_bytes` to `max_bytes` bytes of input per rank (None: any), this kernel.

    `mode` (eager or graph), `bits` (of an element that is reduced), `beside` (whether the group's calls run beside
    other kernels) and `epilogue` (`epilogue_name`, of an all_reduce_rms_norm) narrow it, if they are given.
    `zero_copy`: for calls over symmetric handles, and for no others. `blocks`, `warps`, `tile` (64-bit words; under
    `ll128` of 128 bits) and `registers` (a thread, at most) are the shape of the launch; None leaves it to selection.
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

    def __post_init__(self) -> None:
        kernel = registry.find(self.collective, self.algorithm, self.protocol, self.zero_copy)
        if self.epilogue is not None and kernel not in registry.FUSED:
            raise InvalidArgument(f"{self.collective} has no epilogue {self.epilogue}")
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
    def group(self) -> tuple[str, int | None, str | None, bool | None, str | None, bool]:
        """Rows of one group are compared and replaced together, whatever their sizes."""
        return self.collective, self.bits, self.mode, self.beside, self.epilogue, self.zero_copy


@dataclass(frozen=True)
class ShippedTable:
    """Rows for `device` (cpu, an architecture like sm_90, or cuda for any) and, if given, for one topology."""

    name: str
    device: str
    rows: tuple[TableRow, ...]
    topology: str | None = None


def read_table(name: str) -> bytes:
    """A table that comes with tricomm. Raises `ResourceError` if it cannot be read."""
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
        """Whether the times are of a CPU: those of Triton's interpreter, and for it alone."""
        return self.fingerprint.device == "cpu"

    @property
    def name(self) -> str:
        """Its name in `explain`."""
        return f"tuned {self.fingerprint.digest}{' (simulated)' if self.simulated else ''}"

    @property
    def digest(self) -> bytes:
        """32 bytes that differ if two ranks would choose differently."""
        return _digest([self.name, [asdict(row) for row in self.rows]]).digest()


def shipped(text: bytes) -> tuple[ShippedTable, ...]:
    """The tables that come with tricomm. Not checked here: a test holds our own file to the limits of a user's."""
    tables = json.loads(text)["tables"]
    return tuple(ShippedTable(**{**table, "rows": tuple(TableRow(**row) for row in table["rows"])}) for table in tables)


def _digest(values: Any) -> hashlib._Hash:
    """By the standard library, so that ranks with other packages installed get the same digest."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True)
class _Forms:
    """The JSON forms of `TableRow`, `Fingerprint` and `TunedTable`: classes of msgspec's, which refuse wrong values."""

    msgspec: Any
    row: Any
    fingerprint: Any
    file: Any


def forms(where: str) -> _Forms:
    """The JSON forms. Raises `ResourceError`, naming `where`, if msgspec is missing."""
    try:
        return _forms()
    except ModuleNotFoundError as error:
        raise ResourceError(f"{where}: {error}; pip install msgspec") from None


@cache
def _forms() -> _Forms:
    import msgspec

    text = Annotated[str, msgspec.Meta(max_length=256)]
    ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]
    strict: Any = {"frozen": True, "forbid_unknown_fields": True, "omit_defaults": True}

    def form(kind: Any, limits: dict[str, Any]) -> Any:
        """The fields of `kind`; `limits` replace the types of some. Checked by `kind`, too, so that its errors have
        their place in the file."""
        types = get_type_hints(kind) | limits
        columns: list[Any] = [
            (f.name, types[f.name], *(() if f.default is MISSING else (f.default,))) for f in fields(kind)
        ]
        check = {"__post_init__": lambda decoded: kind(**msgspec.structs.asdict(decoded))}
        return msgspec.defstruct(kind.__name__, columns, namespace=check, **strict)

    limits = {
        "world_size": ranks,
        "max_bytes": Annotated[int, msgspec.Meta(ge=0)] | None,
        "min_bytes": Annotated[int, msgspec.Meta(ge=0)],
        "mode": Literal["eager", "graph"] | None,
        "bits": Literal[8, 16, 32, 64] | None,
        "blocks": Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)] | None,
        "warps": Literal[1, 2, 4, 8, 16, 32] | None,
        "tile": Annotated[int, msgspec.Meta(ge=2, le=_MAX_TILE)] | None,
        "registers": Literal[128, 255] | None,
        "epilogue": Annotated[str, msgspec.Meta(pattern=f"^{_EPILOGUE}$")] | None,
    }
    row = form(TableRow, limits)
    box = form(Fingerprint, dict.fromkeys(("device", "gpu", "topology", "links"), text) | {"world_size": ranks})
    several: Any = tuple
    columns: list[Any] = [
        ("schema", Literal[2]),
        ("kernels", int),
        ("fingerprint", box),
        ("simulated", bool),  # beside the device, for people
        ("rows", several[row, ...]),
        ("date", text, ""),
        ("versions", dict[text, text], msgspec.field(default_factory=dict)),
    ]
    file = msgspec.defstruct("TunedFile", columns, namespace={"__post_init__": _tuned}, **strict)
    return _Forms(msgspec, row, box, file)


def _tuned(decoded: Any) -> TunedTable:
    def values(struct: Any) -> dict[str, Any]:
        return {name: getattr(struct, name) for name in struct.__struct_fields__}

    rows = tuple(TableRow(**values(row)) for row in decoded.rows)
    table = TunedTable(Fingerprint(**values(decoded.fingerprint)), rows, decoded.date, decoded.versions)
    if decoded.simulated != table.simulated:
        times = "simulated" if decoded.simulated else "measured"
        raise InvalidArgument(f"{times} times for device {table.fingerprint.device!r}: only a CPU's are simulated")
    return table


def dumps(table: TunedTable) -> bytes:
    """JSON that `loads` takes back, a row a line. Raises `ResourceError` if msgspec is missing."""
    json_forms = forms("tuning table")
    encode = json_forms.msgspec.json.encode
    box = json_forms.fingerprint(**asdict(table.fingerprint))
    head = encode(json_forms.file(2, KERNELS, box, table.simulated, (), table.date, dict(table.versions)))
    lines = b",\n    ".join(encode(json_forms.row(**asdict(row))) for row in table.rows)
    return bytes(head.replace(b'"rows":[]', b'"rows": [\n    ' + lines + b"\n]", 1) + b"\n")


def loads(text: bytes, where: str) -> TunedTable:
    """The tuned table in JSON `text`. Raises `InvalidArgument` that names `where` and the mistake, `ResourceError` if
    msgspec is missing."""
    json_forms = forms(where)
    msgspec = json_forms.msgspec
    if len(text) > MAX_BYTES:
        raise InvalidArgument(f"{where}: more than {MAX_BYTES} bytes; no tuning table is so long")
    try:
        decoded = msgspec.json.decode(text, type=json_forms.file)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not a tuning table: {error}") from None
    if decoded.kernels != KERNELS:
        raise InvalidArgument(f"{where}: measured with kernels {decoded.kernels}, these are {KERNELS}; tune again")
    return _tuned(decoded)
