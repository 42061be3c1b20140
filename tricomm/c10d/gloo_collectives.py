"""Every collective over a group's own connections; each consists of one or two exchanges of messages.

These are not Gloo's collectives, which need a thread for each ProcessGroupGloo; a wait inside one cannot be cancelled
and does not tell which rank is missing. Here each rank sends straight to every rank that needs its data. A reduction of
few bytes exchanges everything and reduces on every rank (one shot). In one of many bytes each rank reduces a share and
then sends it to all (two shots). Both reduce in rank order, so they give the same bits as each other and as the
kernels.

Before any data moves, the ranks compare their calls: Gloo ends the process if a message is longer than its receiver
expects, and another type gives wrong numbers. They exchange records of a fixed size; each rank reads all of them, so
all come to one verdict. A mismatch costs the call, not the group, because no data is used. A record has room for the
input of a small call, which then needs no second exchange. Descriptions of the calls are exchanged only if the records
differ. TRICOMM_CHECK=0, on all ranks, skips the comparison.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from tricomm.c10d.call_queue import Turn
from tricomm.c10d.dtype_emulation import as_bytes, reduce_into
from tricomm.c10d.gloo_transport import COLLECTIVE, FIRST_LINE_TAG, LINE_TAGS, Part, Transport
from tricomm.c10d.group_calls import GroupCall
from tricomm.errors import CollectiveMismatch, InvalidArgument

_ONE_SHOT_BYTES = 64 * 1024
_ONE_SHOT_BYTES_OF_TWO = 512 * 1024  # two ranks move the same bytes in both ways, and two shots reduce half of them
_SCRATCH_BYTES = 16 * 1024 * 1024  # of memory that a thread keeps for its reductions, because fresh pages are slow

_HEAD = struct.Struct("<QQII")  # of a record: line, number, fingerprint, whether the rank cannot make the call
_WORDS = struct.Struct("<40s200s")  # the call's name and description
_DATA_BYTES = 2048  # in a record

_thread = threading.local()


@dataclass(frozen=True)
class CallContext:
    """The context of one call over the connections: its `deadline` (of `time.monotonic()`), and `what` describes it.

    Messages have the tag of the call's line, so calls of several lines may be in flight. `inputs` are the ranks'
    inputs, if the records contained them.
    """

    transport: Transport
    deadline: float
    what: Callable[[], str]
    turn: Turn
    inputs: list[torch.Tensor] | None = None

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    def others(self) -> list[int]:
        """The other ranks, from the next one on, so that not all ranks begin with the same one."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def exchange(self, sends: list[Part], receives: list[Part]) -> None:
        if self.inputs is None:
            # Two lines whose tags are equal by chance are told apart by their records.
            key = self.turn.line.key
            tag = FIRST_LINE_TAG + key % LINE_TAGS if key else COLLECTIVE
            self.transport.exchange(sends, receives, self.deadline, self.what, tag)
            return
        for rank, x in receives:
            x.copy_(self.inputs[rank][: len(x)])


class CallRecords:
    """The records of one group: this rank's to be written, the others' to be read."""

    def __init__(self, world_size: int) -> None:
        self._splits = struct.Struct(f"<{2 * world_size}q")
        self._data = _HEAD.size + self._splits.size
        self._size = self._data + _DATA_BYTES
        self._bytes = bytearray(world_size * self._size)
        self._rows = list(torch.frombuffer(self._bytes, dtype=torch.uint8).view(world_size, -1).unbind())
        self._inputs = [row[self._data :] for row in self._rows]

    def check(
        self, context: CallContext, batch: list[GroupCall], group: str, problem: Exception | None
    ) -> list[torch.Tensor] | None:
        """The ranks' inputs of the only call of `batch`, as bytes, if they came with the records; else None. They
        are valid until the next check.

        `problem`: why this rank cannot make the call. Raises `CollectiveMismatch`, on every rank, that names the ranks
        and their calls or problems; on a rank with a problem, raises that.
        """
        world_size, rank, first, turn = context.world_size, context.rank, batch[0], context.turn
        sums = zlib.crc32(struct.pack(f"<{len(batch)}I", *(call.fingerprint() for call in batch)))
        start = rank * self._size
        _HEAD.pack_into(self._bytes, start, turn.line.key, turn.number, sums, problem is not None)
        if first.splits is not None:
            self._splits.pack_into(self._bytes, start + _HEAD.size, *first.splits[0], *first.splits[1])
        nbytes = _input_bytes(first) if len(batch) == 1 else None
        small = nbytes is not None and nbytes <= _DATA_BYTES
        if small and nbytes and first.x is not None and problem is None:
            self._inputs[rank][:nbytes].copy_(as_bytes(first.x))
        mine, others = self._rows[rank], context.others()
        context.exchange([(r, mine) for r in others], [(r, self._rows[r]) for r in others])
        heads = {bytes(self._bytes[i : i + _HEAD.size]) for i in range(0, len(self._bytes), self._size)}
        unable = [_HEAD.unpack(head)[3] for head in heads]
        if len(heads) > 1 or any(unable):
            words = _calls_in_words(context, batch, problem)
            if problem is not None:
                raise problem
            different = "a rank cannot make the call" if any(unable) else "ranks made different calls"
            raise CollectiveMismatch(f"{group}, call {turn}: {different}: {words}")
        if first.splits is not None:
            rows = [self._splits.unpack_from(self._bytes, r * self._size + _HEAD.size) for r in range(world_size)]
            _compare_splits(rows, turn, group)
        return self._inputs if small else None


def _calls_in_words(context: CallContext, batch: list[GroupCall], problem: Exception | None) -> str:
    """Each rank's call in words; all ranks have seen that they differ."""
    text = "; ".join(call.text() for call in batch[:2]) + (f"; {len(batch) - 2} more" if len(batch) > 2 else "")
    if problem is not None:
        text += f", but {type(problem).__name__}: {problem}"
    name, size = str(context.turn).encode(), _WORDS.size
    mine = torch.frombuffer(bytearray(_WORDS.pack(name[:40], text.encode()[: size - 40])), dtype=torch.uint8)
    said = [mine if r == context.rank else torch.empty_like(mine) for r in range(context.world_size)]
    others = context.others()
    context.exchange([(r, mine) for r in others], [(r, said[r]) for r in others])
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, row in enumerate(said):
        theirs, words = (text.rstrip(b"\0").decode(errors="replace") for text in _WORDS.unpack(row.numpy().tobytes()))
        groups.setdefault((theirs, words), []).append(rank)
    parts = [f"rank(s) {ranks}: {words} (call {theirs})" for (theirs, words), ranks in groups.items()]
    return "; ".join(parts) + "; make the same call, with the same shape and type, on every rank"


def _compare_splits(rows: list[tuple[int, ...]], turn: Turn, group: str) -> None:
    world_size = len(rows)
    for a in range(world_size):
        for b in range(world_size):
            sent, expected = rows[a][b], rows[b][world_size + a]
            if sent != expected:
                raise CollectiveMismatch(
                    f"{group}, call {turn}: all_to_all: rank {a} sends {sent} elements to rank {b}, which expects "
                    f"{expected}; the input splits of a rank must be the output splits of its peers"
                )


def _input_bytes(call: GroupCall) -> int | None:
    """Bytes of a rank's input, if each receiver gets all of it and all ranks know its size; else None."""
    return call.nbytes if call.collective in _WHOLE_INPUT else None


def check(call: GroupCall) -> None:
    """Raises `InvalidArgument` for a sparse call that cannot be made; `GroupCall`s of other tensors are checked."""
    if call.collective == "all_reduce_sparse":
        (x,) = call.result
        if call.op != "sum" or x.layout != torch.sparse_coo:
            raise InvalidArgument(f"all_reduce: {call.op} of {x.layout} is not defined; sum of a sparse COO tensor is")
        if x.dim() > _DIMENSIONS:
            raise InvalidArgument(f"all_reduce of a sparse tensor of {x.dim()} dimensions: {_DIMENSIONS} at most")


def run(context: CallContext, call: GroupCall) -> None:
    """Run this rank's part of `call`, and return when it is done."""
    TABLE[call.collective](context, call)


def _input_and_output(call: GroupCall) -> tuple[torch.Tensor, torch.Tensor]:
    assert call.x is not None and call.out is not None, "a call of this collective has an input and an output"
    return call.x, call.out


def _rows(x: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """`x` as bytes, in rows of `sizes` elements."""
    return list(as_bytes(x).split([n * x.itemsize for n in sizes]))


def _even(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(as_bytes(x).view(count, -1).unbind()) if x.numel() else [as_bytes(x)] * count


def _exchange_rows(context: CallContext, x: torch.Tensor, rows: list[torch.Tensor]) -> None:
    """Gather all ranks' bytes into `rows`."""
    mine, others = as_bytes(x), context.others()
    context.exchange([(r, mine) for r in others], [(r, rows[r]) for r in others])
    rows[context.rank].copy_(mine)


def _swap_rows(context: CallContext, sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
    """Send row r to rank r."""
    others = context.others()
    context.exchange([(r, sent[r]) for r in others], [(r, received[r]) for r in others])
    received[context.rank].copy_(sent[context.rank])


def _receive_and_reduce(context: CallContext, op: str, rows: list[torch.Tensor], into: torch.Tensor) -> None:
    """Send row r to rank r, which reduces the rows that it gets `into`."""
    mine = rows[context.rank]
    parts = _receive_buffers(context, mine)
    others = context.others()
    context.exchange([(r, as_bytes(rows[r])) for r in others], [(r, as_bytes(parts[r])) for r in others])
    reduce_into(op, parts, into)


def _receive_buffers(context: CallContext, mine: torch.Tensor) -> list[torch.Tensor]:
    """By rank: `mine`, and buffers for the parts that the others send."""
    room = _scratch(mine.nbytes * (context.world_size - 1)).view(mine.dtype)
    rest = [room[i * len(mine) : (i + 1) * len(mine)] for i in range(context.world_size - 1)]
    return [*rest[: context.rank], mine, *rest[context.rank :]]


def _scratch(nbytes: int) -> torch.Tensor:
    """`nbytes` of memory for one call; this thread keeps it for the next."""
    if nbytes > _SCRATCH_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    kept: torch.Tensor | None = getattr(_thread, "scratch", None)
    if kept is None or len(kept) < nbytes:
        kept = _thread.scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return kept[:nbytes]


def _all_reduce(context: CallContext, call: GroupCall) -> None:
    x, out = _input_and_output(call)
    if x.nbytes <= (_ONE_SHOT_BYTES_OF_TWO if context.world_size == 2 else _ONE_SHOT_BYTES):
        _receive_and_reduce(context, call.op, [x] * context.world_size, out)
        return
    ends = [x.numel() * r // context.world_size for r in range(context.world_size + 1)]
    sizes = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    mine = out.split(sizes)[context.rank]
    _receive_and_reduce(context, call.op, list(x.split(sizes)), mine)
    _exchange_rows(context, mine, _rows(out, sizes))


def _reduce(context: CallContext, call: GroupCall) -> None:
    x, out = _input_and_output(call)
    if context.rank != call.root:
        context.exchange([(call.root, as_bytes(x))], [])
        return
    parts = _receive_buffers(context, x)
    context.exchange([], [(r, as_bytes(parts[r])) for r in context.others()])
    reduce_into(call.op, parts, out)


def _reduce_scatter(context: CallContext, call: GroupCall) -> None:
    x, out = _input_and_output(call)
    _receive_and_reduce(context, call.op, list(x.split(list(call.sizes or (out.numel(),) * context.world_size))), out)


def _broadcast(context: CallContext, call: GroupCall) -> None:
    x, _ = _input_and_output(call)
    if context.rank == call.root:
        context.exchange([(r, as_bytes(x)) for r in context.others()], [])
    else:
        context.exchange([], [(call.root, as_bytes(x))])


def _all_gather(context: CallContext, call: GroupCall) -> None:
    x, out = _input_and_output(call)
    _exchange_rows(context, x, _rows(out, list(call.sizes)) if call.sizes else _even(out, context.world_size))


def _gather(context: CallContext, call: GroupCall) -> None:
    assert call.x is not None, "every rank of a gather gives something"
    mine = as_bytes(call.x)
    if call.out is None:
        context.exchange([(call.root, mine)], [])
        return
    rows = _even(call.out, context.world_size)
    context.exchange([], [(r, rows[r]) for r in context.others()])
    rows[context.rank].copy_(mine)


def _scatter(context: CallContext, call: GroupCall) -> None:
    assert call.out is not None, "every rank of a scatter gets something"
    mine = as_bytes(call.out)
    if call.x is None:
        context.exchange([], [(call.root, mine)])
        return
    rows = _even(call.x, context.world_size)
    context.exchange([(r, rows[r]) for r in context.others()], [])
    mine.copy_(rows[context.rank])


def _all_to_all_v(context: CallContext, call: GroupCall) -> None:
    x, out = _input_and_output(call)
    assert call.splits is not None, "an all_to_all has splits"
    sent, received = call.splits
    _swap_rows(context, _rows(x, sent), _rows(out, received))


def _barrier(context: CallContext, call: GroupCall) -> None:
    word = torch.zeros(1, dtype=torch.uint8, device="cpu")
    _swap_rows(context, [word] * context.world_size, [torch.empty_like(word) for _ in range(context.world_size)])


def _all_reduce_sparse(context: CallContext, call: GroupCall) -> None:
    """The sum of COO tensors, in rank order, into the caller's own; ranks may have any number of elements."""
    (x,) = call.result
    mine = x.detach().coalesce()
    head = torch.tensor(
        [mine._nnz(), mine.sparse_dim(), mine.dense_dim(), *_shape(mine)], dtype=torch.int64, device="cpu"
    )
    heads = [torch.empty_like(head) for _ in range(context.world_size)]
    _exchange_rows(context, head, [as_bytes(row) for row in heads])
    if any(row[1:].tolist() != head[1:].tolist() for row in heads):
        said = "; ".join(f"rank {r}: {row[1:].tolist()}" for r, row in enumerate(heads))
        raise CollectiveMismatch(
            f"{context.what()}: ranks have sparse tensors of different shapes (sparse and dense dimensions, type, "
            f"number of dimensions, sizes): {said}; give all ranks one shape and type"
        )
    counts = [int(row[0]) for row in heads]
    values, indices = mine.values(), mine.indices()
    all_indices = _gather_uneven(context, indices.t(), counts)
    all_values = _gather_uneven(context, values, counts)
    parts = [
        torch.sparse_coo_tensor(index.t(), value, mine.shape, check_invariants=True)
        for index, value in zip(all_indices, all_values, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    x.copy_(total.coalesce())


_DIMENSIONS = 32
_DTYPES = sorted({str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)})


def _shape(x: torch.Tensor) -> list[int]:
    return [_DTYPES.index(str(x.dtype)), x.dim(), *x.shape, *[0] * (_DIMENSIONS - x.dim())]


def _gather_uneven(context: CallContext, x: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """All ranks' tensors: dimension 0 of rank r's is `counts[r]` long, the other dimensions are equal."""
    x = x.contiguous()
    row = math.prod(x.shape[1:])
    flat = torch.empty(sum(counts) * row, dtype=x.dtype, device=x.device)
    ends = list(accumulate(counts, initial=0))
    _exchange_rows(context, x.view(-1), _rows(flat, [n * row for n in counts]))
    return [flat[a * row : b * row].view(b - a, *x.shape[1:]) for a, b in zip(ends, ends[1:], strict=False)]


_WHOLE_INPUT = frozenset({"all_reduce", "all_gather", "broadcast", "reduce", "gather", "barrier"})
TABLE: dict[str, Callable[[CallContext, GroupCall], None]] = {
    "all_reduce": _all_reduce,
    "all_reduce_sparse": _all_reduce_sparse,
    "all_gather": _all_gather,
    "all_gather_v": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_v": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_v": _all_to_all_v,
    "barrier": _barrier,
}
