"""Records that tell other ranks of a rank's GPU memory: a common header, and fields that depend on the kind of memory.

magic 4 | version 2 | rank 2 | UUID of the GPU 16 | bytes of memory 8 | fields of the kind
"""

from __future__ import annotations

import struct
from typing import Any

from tricomm.errors import RendezvousError
from tricomm.store.cuda.cuda_driver import UUID_BYTES

_VERSION = 1


class RecordFormat:
    """Records that begin with `magic`; `rest` is the `struct` format of the fields after the header."""

    def __init__(self, magic: bytes, rest: str) -> None:
        self._magic, self._layout = magic, struct.Struct(f"<4sHH{UUID_BYTES}sQ{rest}")

    def pack(self, rank: int, uuid: bytes, nbytes: int, *rest: Any) -> bytes:
        return self._layout.pack(self._magic, _VERSION, rank, uuid, nbytes, *rest)

    def parse(self, data: bytes, rank: int, nbytes: int) -> tuple[Any, ...]:
        """UUID and rest of rank `rank`'s record for `nbytes` bytes; raises `RendezvousError` for another one. Pure."""
        if len(data) != self._layout.size:
            raise RendezvousError(f"rank {rank}'s memory record has {len(data)} bytes, expected {self._layout.size}")
        magic, version, sender, uuid, size, *rest = self._layout.unpack(data)
        if magic != self._magic or version != _VERSION:
            raise RendezvousError(f"rank {rank}'s memory record is not of version {_VERSION}: mixed tricomm versions?")
        if sender != rank:
            raise RendezvousError(f"rank {rank}'s memory record says that it is rank {sender}'s")
        if size != nbytes:
            raise RendezvousError(f"rank {rank} shares {size} bytes, this rank shares {nbytes}: use the same size")
        return uuid, *rest
