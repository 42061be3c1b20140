"""All collectives on the CPU over a group's connections; each consists of one or two exchanges of messages.

These are not ProcessGroupGloo's collectives: a wait inside one cannot be cancelled and does not tell which rank is
missing. Each rank sends to every rank that needs its data. In a short reduction every rank gets all data and reduces it
(one shot). In a long one each rank reduces a share and then sends it to all (two shots). Both reduce in rank order, so
they give the same bits as each other and as the kernels. In a long broadcast the root scatters the data to the other
ranks, which then send their shares to each other.

The first exchange of a call also compares the ranks' calls (`call_records`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import accumulate

import torch

from tricomm.c10d.call_records import CallContext
from tricomm.c10d.dtype_emulation import as_bytes, reduce_into
from tricomm.c10d.group_calls import GroupCall
from tricomm.errors import CollectiveMismatch, InvalidArgument

_ONE_SHOT_BYTES = 64 * 1024
_ONE_SHOT_BYTES_OF_TWO = 512 * 1024  # with two ranks both forms move the same bytes, and two shots reduce half of them
_SCATTER_BYTES = 1024 * 1024  # of a broadcast; from here on the root's sends take longer than a second exchange
_SCRATCH_BYTES = 16 * 1024 * 1024  # memory that a thread keeps for its reductions, because new pages are slow

_BYTE = memoryview(b"\0")
_thread = threading.local()


def check(call: GroupCall) -> None:
    """Raises `InvalidArgument` for a sparse call that cannot be made; other `GroupCall`s have been checked."""
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


def _outputs(call: GroupCall, count: int) -> list[torch.Tensor]:
    """The rows of `call`'s output as bytes, by rank."""
    if call.outs:
        return [as_bytes(row) for row in call.outs]
    assert call.out is not None, "a call of this collective has an output"
    return _rows(call.out, list(call.sizes)) if call.sizes else _even(call.out, count)


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
    """Send row r to rank r, and reduce the rows that this rank receives `into`."""
    mine = rows[context.rank]
    parts = _receive_buffers(context, mine)
    others = context.others()
    context.exchange([(r, as_bytes(rows[r])) for r in others], [(r, as_bytes(parts[r])) for r in others])
    reduce_into(op, parts, into)


def _receive_buffers(context: CallContext, mine: torch.Tensor) -> list[torch.Tensor]:
    """By rank: `mine`, and buffers for the parts of the other ranks."""
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
    assert call.out is not None, "a reduce_scatter has an output"
    rows = call.parts
    if not rows:
        x, out = _input_and_output(call)
        rows = list(x.split(list(call.sizes or (out.numel(),) * context.world_size)))
    _receive_and_reduce(context, call.op, rows, call.out)


def _broadcast(context: CallContext, call: GroupCall) -> None:
    x, _ = _input_and_output(call)
    data = as_bytes(x)
    if x.nbytes >= _SCATTER_BYTES and context.world_size > 2:
        _scatter_and_gather(context, data, call.root)
    elif context.rank == call.root:
        context.exchange([(r, data) for r in context.others()], [])
    else:
        context.exchange([], [(call.root, data)])


def _scatter_and_gather(context: CallContext, data: torch.Tensor, root: int) -> None:
    """Broadcast `data`: `root` sends a share to each of the other ranks, which forward it to each other."""
    shares = list(data.tensor_split(context.world_size - 1))
    shares.insert(root, data[:0])
    mine, others = shares[context.rank], context.others()
    if context.rank == root:
        context.exchange([(r, shares[r]) for r in others], [])
        return
    context.exchange([], [(root, mine)])
    rest = [r for r in others if r != root]
    context.exchange([(r, mine) for r in rest], [(r, shares[r]) for r in rest])


def _all_gather(context: CallContext, call: GroupCall) -> None:
    assert call.x is not None, "every rank of an all_gather gives something"
    _exchange_rows(context, call.x, _outputs(call, context.world_size))


def _gather(context: CallContext, call: GroupCall) -> None:
    assert call.x is not None, "every rank of a gather gives something"
    mine = as_bytes(call.x)
    if call.root != context.rank:
        context.exchange([(call.root, mine)], [])
        return
    rows = _outputs(call, context.world_size)
    context.exchange([], [(r, rows[r]) for r in context.others()])
    rows[context.rank].copy_(mine)


def _scatter(context: CallContext, call: GroupCall) -> None:
    assert call.out is not None, "every rank of a scatter gets something"
    mine = as_bytes(call.out)
    if call.root != context.rank:
        context.exchange([], [(call.root, mine)])
        return
    if call.x is None:
        rows = [as_bytes(part) for part in call.parts]
    else:
        rows = _even(call.x, context.world_size)
    context.exchange([(r, rows[r]) for r in context.others()], [])
    mine.copy_(rows[context.rank])


def _all_to_all_v(context: CallContext, call: GroupCall) -> None:
    assert call.splits is not None, "an all_to_all has splits"
    sent, received = [as_bytes(part) for part in call.parts], [as_bytes(row) for row in call.outs]
    if not sent:
        x, out = _input_and_output(call)
        sent, received = _rows(x, call.splits[0]), _rows(out, call.splits[1])
    _swap_rows(context, sent, received)


def _barrier(context: CallContext, call: GroupCall) -> None:
    others = context.others()
    if context.unchecked is None:  # no rank waits for a record
        context.exchange_memory([(r, _BYTE) for r in others], [(r, memoryview(bytearray(1))) for r in others])
    else:
        context.exchange([], [])


def _all_reduce_sparse(context: CallContext, call: GroupCall) -> None:
    """Write the sum of COO tensors, in rank order, to the caller's tensor; ranks may have different numbers of
    elements."""
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
