"""Calls of c10d that take lists of tensors, one for each rank, as `GroupCall`s."""

from __future__ import annotations

from typing import Any

import torch

from tricomm import arguments
from tricomm.c10d.dtype_emulation import check_reduction
from tricomm.c10d.group_calls import GroupCall, call_of, checked_tensor
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
    if even:
        return call_of("all_gather", x, outs, count=x.numel(), result=result)
    return call_of("all_gather_v", x, outs, sizes=sizes, result=result)


def reduce_scatter(out: torch.Tensor, parts: list[torch.Tensor], op: str, rank: int) -> GroupCall:
    """reduce_scatter from a list, of tensors of any sizes."""
    _check("reduce_scatter", [out], *parts)
    check_reduction(op, out.dtype, "reduce_scatter")
    sizes = tuple(part.numel() for part in parts)
    if sizes[rank] != out.numel():
        raise InvalidArgument(f"reduce_scatter: the output has {out.numel()} elements, this rank's input {sizes[rank]}")
    even = len(set(sizes)) == 1
    if even:
        return call_of("reduce_scatter", parts, out, op=op, count=sum(sizes))
    return call_of("reduce_scatter_v", parts, out, op=op, sizes=sizes)


def gather(outs: list[torch.Tensor], x: torch.Tensor, root: int) -> GroupCall:
    """gather; `outs` is empty on all ranks but `root`."""
    _check("gather", outs, x)
    for i, out in enumerate(outs):
        if out.numel() != x.numel():
            raise InvalidArgument(f"gather: output {i} has {out.numel()} elements, the input {x.numel()}")
    return call_of("gather", x, outs, root=root, count=x.numel(), result=[outs])


def scatter(out: torch.Tensor, parts: list[torch.Tensor], root: int, world_size: int) -> GroupCall:
    """scatter; `parts` is empty on all ranks but `root`."""
    _check("scatter", [out], *parts)
    for i, part in enumerate(parts):
        if part.numel() != out.numel():
            raise InvalidArgument(f"scatter: input {i} has {part.numel()} elements, the output {out.numel()}")
    return call_of("scatter", parts, out, root=root, count=world_size * out.numel())


def all_to_all(outs: list[torch.Tensor], parts: list[torch.Tensor]) -> GroupCall:
    """all_to_all of lists, of tensors of any sizes."""
    _check("all_to_all", outs, *parts)
    splits = [part.numel() for part in parts], [out.numel() for out in outs]
    return call_of("all_to_all_v", parts, outs, splits=splits)


def _check(what: str, outs: list[torch.Tensor], *inputs: torch.Tensor) -> None:
    arguments.check_alike(what, *inputs[:1], *outs, *inputs[1:])
    for out in outs:
        arguments.check_writable(out, what)
