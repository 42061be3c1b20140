"""Which GPU reaches which, and by what: the facts that algorithms are chosen by. `discovery` reads them from a machine.

A topology says only what is the same for all ranks. Known shapes are at the end, for tests and for simulation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.topology import json_format, mesh

MAX_DEVICES = 64
MAX_LINKS = 64  # between two devices; 18 is the most there is


@dataclass(frozen=True)
class Topology:
    """Links and peer access between devices, or between the devices of a group's ranks (`of`), as n x n tables.

    links     NVLinks between i and j; symmetric, zero on the diagonal. Through switches: as many as the pair may use
    peers     may i reach j's memory; true on the diagonal
    switched  whether all pairs are linked through NVSwitches, and none directly
    names     product names, or nothing; no part of comparison by `digest`
    devices   which device each entry is on, numbered as they first appear; entries on one device have no links between
              them and reach each other

    Lists are taken for tuples. Raises `InvalidArgument` for tables that no machine can have.
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
        """What the links make of the devices, the first that fits:

        nvswitch          `switched`
        fully_connected   links between all pairs, without a switch (or one device only)
        hybrid_cube_mesh  8 devices, two linked quads joined by a perfect matching (`cube_mesh.tables`)
        pairs             4 or more, each linked with exactly one other
        pcie              no links at all
        partial           anything else
        """
        if self.switched:
            return "nvswitch"
        if self.fully_connected:
            return "fully_connected"
        if mesh.tables(self) is not None:
            return "hybrid_cube_mesh"
        distinct = [self.devices.index(device) for device in sorted(set(self.devices))]
        linked = [sum(self.links[i][j] > 0 for j in distinct) for i in distinct]
        if not any(linked):
            return "pcie"
        return "pairs" if all(number == 1 for number in linked) else "partial"

    @property
    def fully_connected(self) -> bool:
        """Whether NVLinks join all pairs; entries on one device count as joined. Says nothing of peer access."""
        size, on = range(len(self)), self.devices
        return all(self.links[i][j] or on[i] == on[j] for i in size for j in size)

    @property
    def all_peers(self) -> bool:
        """Whether every device may reach every other's memory, by whatever way."""
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
        """All but the names, as text: equal where, and only where, two topologies are the same, labels included."""
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
        """The topology in a JSON file (`topology_text` has the form); raises `InvalidArgument` with what is wrong."""
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read(json_format.MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"topology file {str(path)!r} cannot be read: {error}") from None
        return cls.loads(text, f"topology file {str(path)!r}")

    @classmethod
    def loads(cls, text: str, where: str = "topology") -> Topology:
        """The topology in JSON `text`; raises `InvalidArgument` that says what is wrong with `where`."""
        fields = json_format.parse(text, where)
        kind = fields.pop("kind", None)
        try:
            found = cls(**fields)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from None
        if kind not in (None, found.kind):
            raise InvalidArgument(f"{where} says kind {kind!r}, but its links make it {found.kind!r}")
        return found

    def dumps(self) -> str:
        """JSON that `loads` takes back."""
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
        return json_format.render(fields)


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
