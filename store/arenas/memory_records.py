"""Records that tell other ranks of a rank's memory: a common header, and fields that depend on the kind of memory.

magic 4 | version 2 | rank 2 | bytes of memory 8 | fields of the kind
"""

from __future__ import annotations

import struct
from typing import Any

from tricomm.errors import RendezvousError

_VERSION = 2


class RecordFormat:
    """Records that begin with `magic`; `rest` is the `struct` format of the fields after the header."""

    def __init__(self, magic: bytes, rest: str) -> None:
        self._magic, self._layout = magic, struct.Struct(f"<4sHHQ{rest}")

    def pack(self, rank: int, nbytes: int, *rest: Any) -> bytes:
        return self._layout.pack(self._magic, _VERSION, rank, nbytes, *rest)

    def parse(self, data: bytes, rank: int, nbytes: int) -> tuple[Any, ...]:
        """The rest of rank `rank`'s record for `nbytes` bytes; raises `RendezvousError` for another one. Pure."""
        if len(data) != self._layout.size:
            raise RendezvousError(f"rank {rank}'s memory record has {len(data)} bytes, expected {self._layout.size}")
        magic, version, sender, size, *rest = self._layout.unpack(data)
        if magic != self._magic or version != _VERSION:
            raise RendezvousError(f"rank {rank}'s memory record is not of version {_VERSION}: mixed tricomm versions?")
        if sender != rank:
            raise RendezvousError(f"rank {rank}'s memory record says that it is rank {sender}'s")
        if size != nbytes:
            raise RendezvousError(f"rank {rank} shares {size} bytes, this rank shares {nbytes}: use the same size")
        return tuple(rest)
