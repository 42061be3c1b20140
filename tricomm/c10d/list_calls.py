"""Calls of c10d that take lists of tensors, one for each rank, as `GroupCall`s."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tricomm import arguments
from tricomm.c10d.dtype_emulation import check_reduction
from tricomm.c10d.group_calls import GroupCall, checked_tensor, flattened, put
from tricomm.errors import InvalidArgument


def tensor_list(tensors: Any, what: str, length: int) -> list[torch.Tensor]:
    """One tensor per rank; c10d wraps the list in another one."""
    tensors = list(tensors)
    if len(tensors) == 1 and isinstance(tensors[0], list | tuple):
        tensors = list(tensors[0])
    if len(tensors) != length:
        raise InvalidArgument(f"{what}: a list of {length} tensors is needed, one per rank; found {len(tensors)}")
    return [checked_tensor(x, f"{what}[{i}]") for i, x in enumerate(tensors)]


def all_gather(outs: list[torch.Tensor], x: torch.Tensor, rank: int, result: Any) -> GroupCall:
    """all_gather into a list. Its tensors may differ in size: row r has the size of rank r's input."""
    _check("all_gather", outs, x)
    sizes = tuple(out.numel() for out in outs)
    if sizes[rank] != x.numel():
        raise InvalidArgument(
            f"all_gather: this rank gives {x.numel()} elements, and its place in the output list has {sizes[rank]}"
        )
    even = len(set(sizes)) == 1
    call = GroupCall(
        "all_gather" if even else "all_gather_v",
        flattened(x),
        count=x.numel() if even else 0,
        sizes=() if even else sizes,
        result=result,
        device=x.device,
        keep=[x, *outs],
    )
    return _writing(call, outs)


def reduce_scatter(out: torch.Tensor, parts: list[torch.Tensor], op: str, rank: int) -> GroupCall:
    """reduce_scatter from a list, of tensors of any sizes."""
    _check("reduce_scatter", [out], *parts)
    check_reduction(op, out.dtype, "reduce_scatter")
    sizes = tuple(part.numel() for part in parts)
    if sizes[rank] != out.numel():
        raise InvalidArgument(f"reduce_scatter: the output has {out.numel()} elements, this rank's input {sizes[rank]}")
    even = len(set(sizes)) == 1
    call = GroupCall(
        "reduce_scatter" if even else "reduce_scatter_v",
        parts=[flattened(part) for part in parts],
        op=op,
        count=sum(sizes) if even else 0,
        sizes=() if even else sizes,
        result=[out],
        device=out.device,
        keep=[out, *parts],
    )
    return _writing_one(call, out)


def gather(outs: list[torch.Tensor], x: torch.Tensor, root: int) -> GroupCall:
    """gather; `outs` is empty on all ranks but `root`."""
    _check("gather", outs, x)
    for i, out in enumerate(outs):
        if out.numel() != x.numel():
            raise InvalidArgument(f"gather: output {i} has {out.numel()} elements, the input {x.numel()}")
    call = GroupCall(
        "gather", flattened(x), root=root, count=x.numel(), result=[outs], device=x.device, keep=[x, *outs]
    )
    return _writing(call, outs)


def scatter(out: torch.Tensor, parts: list[torch.Tensor], root: int, world_size: int) -> GroupCall:
    """scatter; `parts` is empty on all ranks but `root`."""
    _check("scatter", [out], *parts)
    for i, part in enumerate(parts):
        if part.numel() != out.numel():
            raise InvalidArgument(f"scatter: input {i} has {part.numel()} elements, the output {out.numel()}")
    call = GroupCall(
        "scatter",
        parts=[flattened(part) for part in parts],
        root=root,
        count=world_size * out.numel(),
        result=[out],
        device=out.device,
        keep=[out, *parts],
    )
    return _writing_one(call, out)


def all_to_all(outs: list[torch.Tensor], parts: list[torch.Tensor]) -> GroupCall:
    """all_to_all of lists, of tensors of any sizes."""
    _check("all_to_all", outs, *parts)
    call = GroupCall(
        "all_to_all_v",
        parts=[flattened(part) for part in parts],
        splits=([part.numel() for part in parts], [out.numel() for out in outs]),
        result=list(outs),
        device=outs[0].device,
        keep=[*outs, *parts],
    )
    return _writing(call, outs)


def _check(what: str, outs: list[torch.Tensor], *inputs: torch.Tensor) -> None:
    arguments.check_alike(what, *inputs[:1], *outs, *inputs[1:])
    for out in outs:
        arguments.check_writable(out, what)


def _writing(call: GroupCall, outs: list[torch.Tensor]) -> GroupCall:
    """`call`, which writes to `outs`. On a GPU it gets single tensors, because kernels and NCCL take these."""
    rows = [flattened(out.data) for out in outs]
    ends = sorted((row.data_ptr(), row.data_ptr() + row.nbytes) for row in rows if row.numel())
    apart = all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))
    if apart and all(row.data_ptr() == out.data_ptr() for row, out in zip(rows, outs, strict=True) if row.numel()):
        call.outs = rows
    else:  # the last one is written last
        rows = call.outs = [row.new_empty(row.numel()) for row in rows]

        def finish() -> None:
            for out, row in zip(outs, rows, strict=True):
                put(out, row)

        call.finish = finish
    return call if call.device.type == "cpu" else call.flatten()


def _writing_one(call: GroupCall, out: torch.Tensor) -> GroupCall:
    """`call`, which writes to `out`, of any strides."""
    row = call.out = flattened(out.data)
    if row.data_ptr() != out.data_ptr() and out.numel():
        call.finish = partial(put, out, row)
    return call if call.device.type == "cpu" else call.flatten()
