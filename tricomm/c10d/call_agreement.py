"""Before any data moves, the ranks compare what they are about to do.

Gloo ends the process if a message is longer than what its receiver expects, and a type that differs gives wrong
numbers. So each call is preceded by an exchange of fixed-size records; all ranks read all of them and come to one
verdict. A mismatch costs the call, not the group: no data is used. TRICOMM_CHECK=0, on all ranks, leaves it out.

A record has room for the data of a small call, which needs no second exchange then. The words of a call are exchanged
only if the records differ.
"""

from __future__ import annotations

import struct
import zlib

import torch

from tricomm.c10d.dtype_emulation import as_bytes
from tricomm.c10d.gloo_collectives import Turn, given
from tricomm.c10d.normalized_call import Call
from tricomm.errors import CollectiveMismatch

_HEAD = struct.Struct("<QI")  # number, fingerprint
_WORDS = struct.Struct("<Q160s")
_ROOM = 2048  # bytes of data in a record


class Records:
    """The records of one group: this rank's to be written, the others' to be read."""

    def __init__(self, world_size: int) -> None:
        self._splits = struct.Struct(f"<{2 * world_size}q")
        self._data = _HEAD.size + self._splits.size
        self._size = self._data + _ROOM
        self._bytes = bytearray(world_size * self._size)
        self._rows = list(torch.frombuffer(self._bytes, dtype=torch.uint8).view(world_size, -1).unbind())
        self._given = [row[self._data :] for row in self._rows]

    def check(self, turn: Turn, batch: list[Call], number: int, group: str) -> list[torch.Tensor] | None:
        """What each rank gives to the only call of `batch`, as bytes, if it came with the records; else None. It stays
        until the next check.

        Raises `CollectiveMismatch`, on every rank, that names the ranks and what each of them called.
        """
        world_size, rank, first = turn.world_size, turn.rank, batch[0]
        sums = zlib.crc32(struct.pack(f"<{len(batch)}I", *(call.fingerprint() for call in batch)))
        start = rank * self._size
        _HEAD.pack_into(self._bytes, start, number, sums)
        if first.splits is not None:
            self._splits.pack_into(self._bytes, start + _HEAD.size, *first.splits[0], *first.splits[1])
        nbytes = given(first) if len(batch) == 1 else None
        small = nbytes is not None and nbytes <= _ROOM
        if small and nbytes and first.x is not None:
            self._given[rank][:nbytes].copy_(as_bytes(first.x))
        mine, others = self._rows[rank], turn.others()
        turn.exchange([(r, mine) for r in others], [(r, self._rows[r]) for r in others])
        heads = {bytes(self._bytes[i : i + _HEAD.size]) for i in range(0, len(self._bytes), self._size)}
        if len(heads) > 1:
            raise CollectiveMismatch(f"{group}, call {number}: ranks made different calls: {_who(turn, batch, number)}")
        if first.splits is not None:
            rows = [self._splits.unpack_from(self._bytes, r * self._size + _HEAD.size) for r in range(world_size)]
            _compare_splits(rows, number, group)
        return self._given if small else None


def _who(turn: Turn, batch: list[Call], number: int) -> str:
    """Each rank's call in words; all ranks have seen that they differ."""
    text = "; ".join(call.text() for call in batch[:2]) + (f"; {len(batch) - 2} more" if len(batch) > 2 else "")
    mine = torch.frombuffer(bytearray(_WORDS.pack(number, text.encode()[:160])), dtype=torch.uint8)
    said = [mine if r == turn.rank else torch.empty_like(mine) for r in range(turn.world_size)]
    others = turn.others()
    turn.exchange([(r, mine) for r in others], [(r, said[r]) for r in others])
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, row in enumerate(said):
        theirs, words = _WORDS.unpack(row.numpy().tobytes())
        groups.setdefault((theirs, words.rstrip(b"\0").decode(errors="replace")), []).append(rank)
    parts = [f"rank(s) {ranks}: {words} (call {theirs})" for (theirs, words), ranks in groups.items()]
    return "; ".join(parts) + "; make the same call, with the same shape and type, on every rank"


def _compare_splits(rows: list[tuple[int, ...]], number: int, group: str) -> None:
    world_size = len(rows)
    for a in range(world_size):
        for b in range(world_size):
            sent, expected = rows[a][b], rows[b][world_size + a]
            if sent != expected:
                raise CollectiveMismatch(
                    f"{group}, call {number}: all_to_all: rank {a} sends {sent} elements to rank {b}, which expects "
                    f"{expected}; the input splits of a rank must be the output splits of its peers"
                )
