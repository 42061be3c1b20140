"""Every collective over a native Gloo group: one row per collective, composed where Gloo has none of its own.

Each function blocks until this rank's part is done. `gloo` is a `ProcessGroupGloo` that nobody else uses, so that its
calls have the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tricomm.c10d.call import Call
from tricomm.c10d.carriers import as_bytes, carried
from tricomm.c10d.torch_names import c10d

_REDUCE = {
    "sum": c10d.ReduceOp.SUM, "min": c10d.ReduceOp.MIN, "max": c10d.ReduceOp.MAX, "prod": c10d.ReduceOp.PRODUCT,
    "band": c10d.ReduceOp.BAND, "bor": c10d.ReduceOp.BOR, "bxor": c10d.ReduceOp.BXOR,
}  # fmt: skip


def _options(kind: Any, call: Call, **more: Any) -> Any:
    options = kind()
    options.asyncOp = False
    if call.timeout is not None:
        options.timeout = call.timeout
    for name, value in more.items():
        setattr(options, name, value)
    return options


def _both(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    assert call.x is not None and call.out is not None, "a call of this collective has an input and an output"
    return call.x, call.out


def _rows(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(flat.chunk(count)) if flat.numel() else [flat] * count


def _all_reduce(gloo: Any, call: Call) -> None:
    x, out = _both(call)
    data, op, back = carried(x, call.op, gloo.size())
    gloo.allreduce([data], _options(c10d.AllreduceOptions, call, reduceOp=_REDUCE[op])).wait()
    back(data, out)


def _all_reduce_sparse(gloo: Any, call: Call) -> None:
    gloo.allreduce(call.result, _options(c10d.AllreduceOptions, call, reduceOp=_REDUCE[call.op])).wait()


def _reduce(gloo: Any, call: Call) -> None:
    x, out = _both(call)
    data, op, back = carried(x, call.op, gloo.size())
    options = _options(c10d.ReduceOptions, call, reduceOp=_REDUCE[op], rootRank=call.root)
    # Gloo leaves partial sums in the buffers of the others; theirs stay as they were.
    data = data if gloo.rank() == call.root else data.clone()
    gloo.reduce([data], options).wait()
    if gloo.rank() == call.root:
        back(data, out)


def _broadcast(gloo: Any, call: Call) -> None:
    x, _ = _both(call)
    gloo.broadcast([as_bytes(x)], _options(c10d.BroadcastOptions, call, rootRank=call.root)).wait()


def _all_gather(gloo: Any, call: Call) -> None:
    x, out = _both(call)
    rows = _rows(as_bytes(out), gloo.size())
    gloo.allgather([rows], [as_bytes(x)], _options(c10d.AllgatherOptions, call)).wait()


def _all_gather_v(gloo: Any, call: Call) -> None:
    """Rows of different lengths: each rank broadcasts its own."""
    x, out = _both(call)
    for rank, row in enumerate(out.split(list(call.sizes))):
        if rank == gloo.rank():
            row.copy_(x)
        gloo.broadcast([as_bytes(row)], _options(c10d.BroadcastOptions, call, rootRank=rank)).wait()


def _reduce_scatter(gloo: Any, call: Call) -> None:
    x, out = _both(call)
    sizes = call.sizes or (out.numel(),) * gloo.size()
    for rank, row in enumerate(x.split(list(sizes))):
        data, op, back = carried(row, call.op, gloo.size())
        options = _options(c10d.ReduceOptions, call, reduceOp=_REDUCE[op], rootRank=rank)
        data = data.clone()  # the input stays as it was
        gloo.reduce([data], options).wait()
        if rank == gloo.rank():
            back(data, out)


def _gather(gloo: Any, call: Call) -> None:
    assert call.x is not None, "every rank of a gather gives something"
    rows = [_rows(as_bytes(call.out), gloo.size())] if call.out is not None else []
    gloo.gather(rows, [as_bytes(call.x)], _options(c10d.GatherOptions, call, rootRank=call.root)).wait()


def _scatter(gloo: Any, call: Call) -> None:
    assert call.out is not None, "every rank of a scatter gets something"
    rows = [_rows(as_bytes(call.x), gloo.size())] if call.x is not None else []
    gloo.scatter([as_bytes(call.out)], rows, _options(c10d.ScatterOptions, call, rootRank=call.root)).wait()


def _all_to_all_v(gloo: Any, call: Call) -> None:
    x, out = _both(call)
    assert call.splits is not None, "an all_to_all has splits"
    sent, received = ([n * x.itemsize for n in counts] for counts in call.splits)
    options = _options(c10d.AllToAllOptions, call)
    gloo.alltoall_base(as_bytes(out), as_bytes(x), received, sent, options).wait()


def _barrier(gloo: Any, call: Call) -> None:
    gloo.barrier(_options(c10d.BarrierOptions, call)).wait()


TABLE: dict[str, Callable[[Any, Call], None]] = {
    "all_reduce": _all_reduce,
    "all_reduce_sparse": _all_reduce_sparse,
    "all_gather": _all_gather,
    "all_gather_v": _all_gather_v,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_v": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_v": _all_to_all_v,
    "barrier": _barrier,
}
