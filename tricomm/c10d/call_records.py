"""The ranks compare their records of a call on the CPU before they use each other's data.

If types or operations differed, results would be wrong. So the first exchange of a call carries records of a fixed
size. Each rank reads all records, so all ranks reach the same result. A mismatch ends the call, not the group, because
no data is used. Short data is sent with the record, longer data after the comparison. Descriptions of the calls are
exchanged only if the records differ. TRICOMM_CHECK=0, on all ranks, skips the comparison.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import torch

from tricomm.c10d.call_queue import Turn
from tricomm.c10d.dtype_emulation import memory
from tricomm.c10d.group_calls import GroupCall
from tricomm.errors import CollectiveMismatch
from tricomm.store.tcp import waits
from tricomm.store.tcp.matching import FIRST_OWN_TAG, Transfer
from tricomm.store.tcp.transport import Transport

Part = tuple[int, memoryview]  # a rank, and the memory that is sent to it or received from it
Row = tuple[int, torch.Tensor]  # the same, as a tensor of bytes

_MAIN_TAG = FIRST_OWN_TAG  # of the program's calls
_FIRST_LINE_TAG = FIRST_OWN_TAG + 16  # from here on, tags of the calls that callbacks make
_LINE_TAGS = (1 << 31) - _FIRST_LINE_TAG
_SHORT_BYTES = 64 * 1024  # limit of data that is sent with the record, and copied once more on arrival
_HEAD = struct.Struct("<QQII")  # line, number, fingerprint, whether the rank cannot make the call
_WORDS = struct.Struct("<40s200s")  # the call's name and description


class CallContext:
    """The context of one call over the connections: its `deadline` (of `time.monotonic()`), and its description `what`.

    Messages have the tag of the call's line, so calls of several lines may be in flight. `unchecked` are the records
    for the first exchange, until it has been made.
    """

    __slots__ = ("deadline", "rank", "tag", "transport", "turn", "unchecked", "what", "world_size")

    def __init__(self, transport: Transport, deadline: float, what: Callable[[], str], turn: Turn) -> None:
        self.transport, self.deadline, self.what, self.turn = transport, deadline, what, turn
        self.rank, self.world_size = transport.rank, transport.world_size
        self.unchecked: CallRecords | None = None
        # Two lines may have the same tag by chance; the records distinguish them.
        key = turn.line.key
        self.tag = _FIRST_LINE_TAG + key % _LINE_TAGS if key else _MAIN_TAG

    def others(self) -> list[int]:
        """The other ranks, from the next one on, so that not all ranks begin with the same one."""
        return self.transport.others_from_next

    def exchange(self, sends: list[Row], receives: list[Row]) -> None:
        """Send and receive bytes of tensors; raises as `CallRecords.check` does."""
        sent = [(r, memory(x)) for r, x in sends]
        received = [(r, memory(x)) for r, x in receives]
        records, self.unchecked = self.unchecked, None
        if records is None:
            self.exchange_memory(sent, received)
        else:
            records.check(self, sent, received)

    def exchange_memory(self, sends: list[Part], receives: list[Part]) -> None:
        """Send and receive; parts without bytes are left out, on both sides."""
        sent = [Transfer(rank, self.tag, (data,)) for rank, data in sends if data]
        received = [Transfer(rank, self.tag, (data,)) for rank, data in receives if data]
        self.transfer(sent, received)

    def transfer(self, sends: list[Transfer], receives: list[Transfer]) -> None:
        """As `Transport.exchange`."""
        late = _not_attached if self.turn.line.key else waits.not_come
        self.transport.exchange(sends, receives, self.deadline, self.what, late)


def _not_attached(missing: list[int], limit: float) -> CollectiveMismatch:
    return CollectiveMismatch(
        f"rank(s) {missing} have not made this call within the timeout of {limit:.1f} s: a callback makes it, which "
        "every rank must attach to the same call's future, in the same place"
    )


class CallRecords:
    """The ranks' records of a batch of calls.

    A group reuses the object for its calls, one after another.
    """

    def __init__(self, world_size: int, group: str) -> None:
        self._group, self._splits = group, struct.Struct(f"<{2 * world_size}q")
        self._size = _HEAD.size + self._splits.size
        self._mine = memoryview(bytearray(self._size))
        self._theirs = [memoryview(bytearray(self._size)) for _ in range(world_size)]
        self._batch: list[GroupCall] = []
        self._problem: Exception | None = None

    def write(self, batch: list[GroupCall], turn: Turn, problem: Exception | None) -> None:
        """Write this rank's record. `problem`: why this rank cannot make the calls."""
        self._batch, self._problem = batch, problem
        sums = batch[0].fingerprint()
        if len(batch) > 1:
            sums = zlib.crc32(struct.pack(f"<{len(batch)}I", *(call.fingerprint() for call in batch)))
        _HEAD.pack_into(self._mine, 0, turn.line.key, turn.number, sums, problem is not None)
        if batch[0].splits is not None:
            self._splits.pack_into(self._mine, _HEAD.size, *batch[0].splits[0], *batch[0].splits[1])

    def check(self, context: CallContext, sends: list[Part], receives: list[Part]) -> None:
        """Exchange the records, and the data of `sends` and `receives`.

        If they differ, raises `CollectiveMismatch` on every rank, which names the ranks and their calls or problems; a
        rank with a problem raises that instead.
        """
        batch, problem = self._batch, self._problem
        self._batch, self._problem = [], None
        short = {r: data for r, data in sends if len(data) <= _SHORT_BYTES}
        expected = {r: len(data) for r, data in receives if len(data) <= _SHORT_BYTES}
        others = context.others()
        records = [(r, self._room(r, self._size + expected.get(r, 0))) for r in others]
        tag, mine = context.tag, self._mine
        sent = [Transfer(r, tag, (mine, short[r]) if r in short else (mine,)) for r in others]
        received = [Transfer(r, tag, (record,), loose=True) for r, record in records]
        context.transfer(sent, received)
        head = self._mine[: _HEAD.size]
        if problem is not None or any(record[: _HEAD.size] != head for _, record in records):
            words = _calls_in_words(context, batch, problem)
            if problem is not None:
                raise problem
            unable = any(_HEAD.unpack_from(record)[3] for _, record in records)
            different = "a rank cannot make the call" if unable else "ranks made different calls"
            raise CollectiveMismatch(f"{self._group}, call {context.turn}: {different}: {words}")
        if batch[0].splits is not None:
            self._compare_splits(context)
        longer = []
        for rank, data in receives:
            if len(data) > _SHORT_BYTES:
                longer.append((rank, data))
            else:
                data[:] = self._theirs[rank][self._size : self._size + len(data)]
        rest = [(r, data) for r, data in sends if len(data) > _SHORT_BYTES]
        if rest or longer:
            context.exchange_memory(rest, longer)

    def _room(self, rank: int, nbytes: int) -> memoryview:
        kept = self._theirs[rank]
        if len(kept) < nbytes:
            kept = self._theirs[rank] = memoryview(bytearray(self._size + _SHORT_BYTES))
        return kept[:nbytes]

    def _compare_splits(self, context: CallContext) -> None:
        self._theirs[context.rank][: self._size] = self._mine
        rows = [self._splits.unpack_from(record, _HEAD.size) for record in self._theirs]
        for a in range(context.world_size):
            for b in range(context.world_size):
                sent, expected = rows[a][b], rows[b][context.world_size + a]
                if sent != expected:
                    raise CollectiveMismatch(
                        f"{self._group}, call {context.turn}: all_to_all: rank {a} sends {sent} elements to rank {b}, "
                        f"which expects {expected}; the input splits of a rank must be the output splits of its peers"
                    )


def _calls_in_words(context: CallContext, batch: list[GroupCall], problem: Exception | None) -> str:
    """Each rank's call in words; all ranks have seen that they differ."""
    text = "; ".join(call.text() for call in batch[:2]) + (f"; {len(batch) - 2} more" if len(batch) > 2 else "")
    if problem is not None:
        text += f", but {type(problem).__name__}: {problem}"
    name, size = str(context.turn).encode(), _WORDS.size
    mine = memoryview(_WORDS.pack(name[:40], text.encode()[: size - 40]))
    said = [mine if r == context.rank else memoryview(bytearray(size)) for r in range(context.world_size)]
    others = context.others()
    context.exchange_memory([(r, mine) for r in others], [(r, said[r]) for r in others])
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, row in enumerate(said):
        theirs, words = (text.rstrip(b"\0").decode(errors="replace") for text in _WORDS.unpack(row))
        groups.setdefault((theirs, words), []).append(rank)
    parts = [f"rank(s) {ranks}: {words} (call {theirs})" for (theirs, words), ranks in groups.items()]
    return "; ".join(parts) + "; make the same call, with the same shape and type, on every rank"
