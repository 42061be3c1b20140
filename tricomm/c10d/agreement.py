"""Before any data moves, the ranks compare what they are about to do.

Gloo ends the process if a message is longer than what its receiver expects, and a type that differs gives wrong
numbers. So each call is preceded by an exchange of fixed-size records; all ranks read all of them and come to one
verdict. A mismatch costs the call, not the group: no data was sent. TRICOMM_CHECK=0, on all ranks, leaves it out.
"""

from __future__ import annotations

import struct
import zlib

import torch

from tricomm.c10d.call import Call
from tricomm.c10d.gloo_collectives import Turn
from tricomm.errors import CollectiveMismatch

_TEXT = 160
_HEAD = struct.Struct(f"<QI{_TEXT}s")


def check(turn: Turn, batch: list[Call], number: int, group: str) -> None:
    """Raises `CollectiveMismatch`, on every rank, that names the ranks and what each of them called."""
    world_size = turn.world_size
    mine = torch.frombuffer(_record(batch, number, world_size), dtype=torch.uint8)
    records = torch.empty(world_size, len(mine), dtype=torch.uint8)
    rows, others = list(records.unbind()), turn.others()
    turn.exchange([(r, mine) for r in others], [(r, rows[r]) for r in others])
    rows[turn.rank].copy_(mine)
    said = [_HEAD.unpack_from(row.numpy().tobytes()) for row in records]
    if any(head[:2] != said[0][:2] for head in said):
        raise CollectiveMismatch(f"{group}, call {number}: ranks made different calls: {_who(said)}")
    if batch[0].splits is not None:
        _compare_splits(records, number, group)


def _record(batch: list[Call], number: int, world_size: int) -> bytearray:
    text = "; ".join(call.text() for call in batch[:2]) + (f"; {len(batch) - 2} more" if len(batch) > 2 else "")
    sums = zlib.crc32(struct.pack(f"<{len(batch)}I", *(call.fingerprint() for call in batch)))
    counts = batch[0].splits or ([], [])
    flat = [*counts[0], *counts[1]] or [0] * (2 * world_size)
    return bytearray(_HEAD.pack(number, sums, text.encode()[:_TEXT]) + struct.pack(f"<{2 * world_size}q", *flat))


def _who(said: list[tuple[int, int, bytes]]) -> str:
    groups: dict[tuple[int, int, str], list[int]] = {}
    for rank, (number, sums, text) in enumerate(said):
        groups.setdefault((number, sums, text.rstrip(b"\0").decode(errors="replace")), []).append(rank)
    parts = [f"rank(s) {ranks}: {text} (call {number})" for (number, _, text), ranks in groups.items()]
    return "; ".join(parts) + "; make the same call, with the same shape and type, on every rank"


def _compare_splits(records: torch.Tensor, number: int, group: str) -> None:
    world_size = len(records)
    numbers = struct.Struct(f"<{2 * world_size}q")
    rows = [numbers.unpack_from(row.numpy().tobytes(), _HEAD.size) for row in records]
    counts = torch.tensor(rows, dtype=torch.int64).view(world_size, 2, world_size)
    sent, received = counts[:, 0], counts[:, 1].t()
    if not torch.equal(sent, received):
        a, b = (int(i) for i in (sent != received).nonzero()[0])
        raise CollectiveMismatch(
            f"{group}, call {number}: all_to_all: rank {a} sends {int(sent[a, b])} elements to rank {b}, which expects "
            f"{int(received[a, b])}; the input splits of a rank must be the output splits of its peers"
        )
