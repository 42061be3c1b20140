"""What a rank tells the others of its block of GPU memory: one record of fixed size, checked before use."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tricomm.errors import RendezvousError
from tricomm.store.cuda_driver import HANDLE_BYTES, UUID_BYTES

GRANULE_BYTES = 2 << 20  # CUDA cuts smaller allocations from shared pieces of this size
_ALIGNMENT_BYTES = 256
_MAGIC = b"TCIP"
_VERSION = 1
_RECORD = struct.Struct(f"<4sHH{UUID_BYTES}sQQ{HANDLE_BYTES}s")


@dataclass(frozen=True)
class Record:
    """What a rank tells the others of its block. Never printed: the handle is a key to the memory."""

    rank: int
    uuid: bytes
    nbytes: int
    offset: int
    handle: bytes

    def pack(self) -> bytes:
        return _RECORD.pack(_MAGIC, _VERSION, self.rank, self.uuid, self.nbytes, self.offset, self.handle)

    def __repr__(self) -> str:
        return f"Record(rank={self.rank}, nbytes={self.nbytes})"


def parse_record(data: bytes, rank: int, nbytes: int) -> Record:
    """Rank `rank`'s record for a block of `nbytes` bytes; raises `RendezvousError` for anything else. Pure."""
    if len(data) != _RECORD.size:
        raise RendezvousError(f"rank {rank}'s memory record has {len(data)} bytes, expected {_RECORD.size}")
    magic, version, sender, uuid, size, offset, handle = _RECORD.unpack(data)
    if magic != _MAGIC or version != _VERSION:
        raise RendezvousError(f"rank {rank}'s memory record is not of version {_VERSION}: mixed tricomm versions?")
    if sender != rank:
        raise RendezvousError(f"rank {rank}'s memory record says that it is rank {sender}'s")
    if size != nbytes:
        raise RendezvousError(f"rank {rank} shares {size} bytes where this rank shares {nbytes}: use the same size")
    if offset >= GRANULE_BYTES or offset % _ALIGNMENT_BYTES:
        raise RendezvousError(f"rank {rank}'s block lies {offset} bytes into its allocation: not a place CUDA gives")
    return Record(rank, uuid, nbytes, offset, handle)
