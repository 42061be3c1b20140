"""The links and peer access between GPUs, by which algorithms are chosen. `discovery` reads them from a machine.

A topology has only facts that are the same for all ranks. Its JSON form has these fields besides "schema":

links     rows of whole numbers: NVLinks between devices i and j
peers     rows of true or false: may device i reach device j's memory
switched  true or false: are the links through NVSwitches
names     optional: product names, one per device
devices   optional, for ranks that share devices: the device of each
kind      optional: `Topology.kind`; refused if the links have another
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tricomm import gone
from tricomm.errors import InvalidArgument
from tricomm.topology import mesh

MAX_DEVICES = 64
MAX_LINKS = 64  # between two devices; no GPU today has more than 18
MAX_JSON_BYTES = 1 << 20
SCHEMA = "tricomm-topology-1"
_NEEDED = ("links", "peers", "switched")
_OPTIONAL = ("names", "devices", "kind")


@dataclass(frozen=True)
class Topology:
    """Links and peer access between devices, or between the devices of a group's ranks (`of`), as n x n tables.

    links     NVLinks between i and j, also through switches; symmetric, zero on the diagonal
    peers     may i reach j's memory; true on the diagonal
    switched  whether all pairs are linked through NVSwitches, and none directly
    names     product names, or nothing; no part of comparison by `digest`
    devices   the device of each entry, numbered as they first appear; entries on one device have no links between
              them and reach each other

    Lists are converted to tuples. Raises `InvalidArgument` for tables that no machine can have.
    """

    links: tuple[tuple[int, ...], ...]
    peers: tuple[tuple[bool, ...], ...]
    switched: bool = False
    names: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.links)
        if not 1 <= count <= MAX_DEVICES:
            raise _fault(f"{count} devices; there may be 1 to {MAX_DEVICES}")
        given = tuple(self.devices) or tuple(range(count))
        if self.names and [type(name) is str and name.isprintable() for name in self.names] != [True] * count:
            raise _fault(f"names must be {count} printable strings")
        if [type(device) for device in given] != [int] * count:
            raise _fault(f"devices must be {count} whole numbers")
        if type(self.switched) is not bool:
            raise _fault(f"switched={self.switched!r} must be true or false")
        seen = list(dict.fromkeys(given))
        if self.switched and len(seen) == 1:
            raise _fault("switched, but there is one device only")
        object.__setattr__(self, "devices", tuple(seen.index(device) for device in given))
        object.__setattr__(self, "names", tuple(self.names))
        for name, kind in (("links", int), ("peers", bool)):
            object.__setattr__(self, name, _square(name, getattr(self, name), count, kind))
        for i in range(count):
            for j in range(count):
                self._check(i, j, self.devices.index(self.devices[i]), self.devices.index(self.devices[j]))

    def _check(self, i: int, j: int, first_i: int, first_j: int) -> None:
        links, back, reach = self.links[i][j], self.links[j][i], self.peers[i][j]
        if not 0 <= links <= MAX_LINKS:
            raise _fault(f"links[{i}][{j}]={links}: a pair has 0 to {MAX_LINKS} NVLinks")
        if links != back:
            raise _fault(f"links[{i}][{j}]={links} and links[{j}][{i}]={back}: an NVLink joins both, so they are equal")
        if first_i == first_j:
            if links or not reach:
                who = f"device {i}" if i == j else f"{i} and {j} on one device"
                raise _fault(f"links[{i}][{j}]={links}, peers[{i}][{j}]={reach}: {who}, which needs no link to itself")
        elif links != self.links[first_i][first_j] or reach != self.peers[first_i][first_j]:
            raise _fault(f"row {i}, column {j} is not as row {first_i}, column {first_j}, which are the same devices")
        elif self.switched and not links:
            raise _fault(f"switched, but {i} and {j} have no links")

    def __len__(self) -> int:
        return len(self.links)

    @property
    def kind(self) -> str:
        """The shape of the links, the first of these that fits:

        nvswitch          `switched`
        fully_connected   links between all pairs, without a switch (or one device only)
        hybrid_cube_mesh  8 devices, two linked quads joined by a perfect matching (`mesh.positions`)
        pairs             4 or more, each linked with exactly one other
        pcie              no links at all
        partial           anything else
        """
        if self.switched:
            return "nvswitch"
        if self.fully_connected:
            return "fully_connected"
        if mesh.positions(self.links) is not None:
            return "hybrid_cube_mesh"
        distinct = [self.devices.index(device) for device in sorted(set(self.devices))]
        linked = [sum(self.links[i][j] > 0 for j in distinct) for i in distinct]
        if not any(linked):
            return "pcie"
        return "pairs" if all(number == 1 for number in linked) else "partial"

    @property
    def fully_connected(self) -> bool:
        """Whether NVLinks join all pairs; entries on one device count as joined. Independent of peer access."""
        size, on = range(len(self)), self.devices
        return all(self.links[i][j] or on[i] == on[j] for i in size for j in size)

    @property
    def all_peers(self) -> bool:
        """Whether every device may reach every other's memory, by any way."""
        return all(all(row) for row in self.peers)

    def of(self, devices: Sequence[int]) -> Topology:
        """The topology of a group whose rank r is on device `devices[r]` of this one; ranks may share a device.

        Raises `InvalidArgument` for a device that is not there, or no or too many ranks.
        """
        chosen = list(devices)
        for device in chosen:
            if type(device) is not int or not 0 <= device < len(self):
                raise InvalidArgument(f"device {device!r} is not in this topology; it has 0 to {len(self) - 1}")
        on = tuple(self.devices[device] for device in chosen)
        return Topology(
            links=tuple(tuple(self.links[a][b] for b in chosen) for a in chosen),
            peers=tuple(tuple(self.peers[a][b] for b in chosen) for a in chosen),
            switched=self.switched and len(set(on)) > 1,
            names=tuple(self.names[device] for device in chosen) if self.names else (),
            devices=on,
        )

    @property
    def canonical(self) -> str:
        """All but the names, as text: equal if and only if two topologies are the same, labels included."""
        links = "/".join(" ".join(map(str, row)) for row in self.links)
        peers = "/".join("".join("01"[reach] for reach in row) for row in self.peers)
        devices = " ".join(map(str, self.devices))
        return f"devices {devices}; links {links}; peers {peers}; {'switched' if self.switched else 'direct'}"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of `canonical`, for ranks to compare and for tables to be keyed by."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:16]

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """The topology in a JSON file (its form is above); raises `InvalidArgument` that names the mistake."""
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read(MAX_JSON_BYTES + 1)
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"topology file {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        return cls.loads(text, f"topology file {str(path)!r}")

    @classmethod
    def loads(cls, text: str, where: str = "topology") -> Topology:
        """The topology in JSON `text`; raises `InvalidArgument` that names `where` and the mistake."""
        fields = _parse_json(text, where)
        kind = fields.pop("kind", None)
        try:
            topology = cls(**fields)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from None
        if kind not in (None, topology.kind):
            raise InvalidArgument(f"{where} says kind {kind!r}, but its links make it {topology.kind!r}")
        return topology

    def dumps(self) -> str:
        """JSON for `loads`."""
        fields: dict[str, Any] = {
            "kind": self.kind,
            "switched": self.switched,
            "links": [list(row) for row in self.links],
            "peers": [list(row) for row in self.peers],
        }
        if self.names:
            fields["names"] = list(self.names)
        if len(set(self.devices)) < len(self):
            fields["devices"] = list(self.devices)
        return render_json(fields)


def _square(name: str, table: Any, count: int, kind: type) -> tuple[tuple[Any, ...], ...]:
    rows = tuple(tuple(row) for row in table)
    lengths = [len(row) for row in rows]
    if lengths != [count] * count:
        raise _fault(f"{name} has rows of {lengths} entries; {count} rows of {count} are needed")
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if type(value) is not kind:
                needed = "a whole number" if kind is int else "true or false"
                raise _fault(f"{name}[{i}][{j}]={value!r} is not {needed}")
    return rows


def _fault(text: str) -> InvalidArgument:
    return InvalidArgument(f"not a topology: {text}")


def _parse_json(text: str, where: str) -> dict[str, Any]:
    """The fields of one topology in `text`, without the schema; `where` names the text in errors.

    Raises `InvalidArgument` if it is no JSON object of this schema: fields and types, not their meaning.
    """
    if len(text) > MAX_JSON_BYTES:
        raise InvalidArgument(f"{where}: more than {MAX_JSON_BYTES} characters; a topology takes a few thousand")
    try:
        fields = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(f"{where}: a JSON object is needed, not a {type(fields).__name__}")
    schema = fields.pop("schema", None)
    if schema != SCHEMA:
        raise InvalidArgument(f"{where}: schema {schema!r} is not known; it must be {SCHEMA!r}")
    if "unknown" in fields:
        raise InvalidArgument(f"{where} is of a machine whose links are not known: {fields['unknown']}")
    missing = [name for name in _NEEDED if name not in fields]
    gone.refuse(*(f"{name} of a topology" for name in fields))
    strange = sorted(set(fields) - {*_NEEDED, *_OPTIONAL})
    if missing or strange:
        fault = f"there is no {', '.join(missing)}" if missing else f"{', '.join(strange)} is not known"
        raise InvalidArgument(f"{where}: {fault}; needed: {', '.join(_NEEDED)}; optional: {', '.join(_OPTIONAL)}")
    for name in ("links", "peers"):
        table = fields[name]
        if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
            raise InvalidArgument(f"{where}: {name} must be a list of rows, each a list")
    for name in ("names", "devices"):
        if not isinstance(fields.get(name, []), list):
            raise InvalidArgument(f"{where}: {name} must be a list, one entry per device")
    return fields


def render_json(fields: dict[str, Any]) -> str:
    """JSON for `fields`, one row of a table a line, so that people can read and change it."""
    lines = [f'  "schema": {json.dumps(SCHEMA)}']
    for name, value in fields.items():
        table = isinstance(value, list) and value and isinstance(value[0], list)
        rows = ",\n".join(f"    {json.dumps(row)}" for row in value) if table else ""
        lines.append(f'  "{name}": ' + (f"[\n{rows}\n  ]" if table else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    return dict(pairs)
