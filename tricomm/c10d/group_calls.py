"""Calls of a group in one form, whichever of c10d's forms they came in: flat tensors, an operation, a root.

c10d takes tensors, lists of them and lists of lists, options or their short forms. Each function here makes one
`GroupCall` of that, or refuses it. Everything is checked before anything is sent, so a refused call leaves the group
as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from tricomm import arguments
from tricomm.c10d.call_guard import check_not_wrapper
from tricomm.c10d.dtype_emulation import check_reduction
from tricomm.core.fused.fused_call import FUSED, FusedCall
from tricomm.core.symmetric import Symmetric
from tricomm.errors import InvalidArgument
from tricomm.store.control import Descriptor, PackedDescriptor

_UNSUPPORTED = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
OPERATIONS = arguments.REDUCE_OPS | {"PREMUL_SUM": "premul_sum"}


@dataclass
class GroupCall:
    """`x` and `out` are contiguous, 1-dimensional and detached; in a collective that works in place they are one.

    `splits` are (elements sent to each rank, elements received from each). `prepare` is called when it is the call's
    turn, `finish` copies the result into the caller's own tensors. `result` is the value of the future: the caller's
    list. `fused` is the call of which an all_reduce is a part: the kernels run all of it; after another backend's
    all_reduce `finish` does the rest. `handle` is the symmetric memory in which the larger tensor of an all_gather or a
    reduce_scatter lies, if the peers can read it.
    """

    collective: str
    x: torch.Tensor | None = None
    out: torch.Tensor | None = None
    op: str = "none"
    root: int = -1
    sizes: tuple[int, ...] = ()
    splits: tuple[list[int], list[int]] | None = None
    result: list[Any] = field(default_factory=list)
    finish: Callable[[], None] = lambda: None
    prepare: Callable[[], None] = lambda: None
    timeout: timedelta | None = None
    async_op: bool = True
    count: int = 0
    device: torch.device = torch.device("cpu")
    keep: list[torch.Tensor] = field(default_factory=list)  # the caller's tensors, for as long as a stream uses them
    fused: FusedCall | None = None
    handle: Symmetric | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        tensor = self.x if self.x is not None else self.out
        return None if tensor is None else tensor.dtype

    @property
    def nbytes(self) -> int | None:
        """Input bytes of one rank; None if they may differ between ranks."""
        if self.splits is not None or self.sizes:
            return None
        return 0 if self.dtype is None else self.count * self.dtype.itemsize

    @property
    def shape(self) -> tuple[Any, ...]:
        """All that decides the route of the call; equal on all ranks, except for the number of the device."""
        more = None if self.fused is None else self.fused.epilogue
        return self.device, self.collective, self.dtype, self.op, self.count, self.root, self.sizes, self.nbytes, more

    def text(self) -> str:
        """All that the ranks must agree on, in words."""
        words = [self.collective]
        if self.fused is not None:
            words = [FUSED, self.fused.epilogue.text()]
        elif self.op != "none":
            words.append(f"op={self.op}")
        if self.dtype is not None:
            words.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
            words.append(
                f"sizes={list(self.sizes)}" if self.sizes else f"count={self.count}" if not self.splits else ""
            )
        if self.root >= 0:
            words.append(f"root={self.root}")
        return " ".join(word for word in words if word)

    def fingerprint(self) -> int:
        more = None if self.fused is None else self.fused.epilogue
        return arguments.fingerprint(self.collective, self.op, str(self.dtype), self.count, self.root, self.sizes, more)

    def record(self, path: str) -> PackedDescriptor:
        """The control page's record of a call that goes to the backend `path` instead of the kernels."""
        dtype = str(self.dtype).removeprefix("torch.")
        name = (self.collective, self.op) if self.fused is None else (FUSED, self.fused.epilogue.text())
        text = (*name, dtype, path, path)
        return Descriptor(0, self.fingerprint(), *text, self.count, self.root, 0, "eager").packed()


def operation(op: Any) -> str:
    """The name of a `ReduceOp`; raises `InvalidArgument` for anything else."""
    kind = getattr(op, "op", op)
    name = OPERATIONS.get(getattr(kind, "name", ""))
    if name is None:
        raise InvalidArgument(f"op={op!r}: a torch.distributed.ReduceOp is needed")
    return name


def options(kind: Any, given: Any, field: str | None, timeout: timedelta | None) -> Any:
    """c10d's options. The short forms of a call pass the value of one `field` instead."""
    if hasattr(given, "asyncOp"):
        return given
    made = kind()
    if isinstance(given, timedelta):
        timeout = given
    elif given is not None and field is not None:
        try:
            setattr(made, field, given)
        except TypeError:
            needed = "a torch.distributed.ReduceOp" if field == "reduceOp" else "a rank of the group"
            raise InvalidArgument(f"{field}={given!r}: {needed} is needed") from None
    if timeout is not None:
        made.timeout = timeout
    return made


def read_first(batch: list[GroupCall], rank: int) -> None:
    """Copy each input that shares memory with an output, so that every call of `batch` reads it as it is now. A call in
    place does not need that: the input of an all_gather, or the output of a reduce_scatter, is row `rank` of the
    other."""
    if len(batch) == 1 and (batch[0].x is batch[0].out or batch[0].device.type != "cpu"):
        return
    outputs = [(call, out) for call in batch for out in call.result if isinstance(out, torch.Tensor)]
    for call in batch:
        x = call.x
        if x is None or not any(
            arguments.overlap(x, out) for other, out in outputs if not _in_place(call, other, rank)
        ):
            continue
        call.keep.append(copy := x.clone())
        if call.out is x:
            call.out = copy
            call.finish = partial(_put, call.keep[0], copy)
        call.x = copy


def _in_place(call: GroupCall, other: GroupCall, rank: int) -> bool:
    """Whether `call` is `other`, and works in place."""
    x, out = call.x, call.out
    if call is not other or x is None or out is None or call.splits is not None:
        return False
    part, whole = (x, out) if x.numel() < out.numel() else (out, x)
    return part.data_ptr() == whole.data_ptr() + (x.numel() != out.numel()) * rank * part.nbytes


def single_tensor(tensors: Any, what: str) -> torch.Tensor:
    """The only tensor of a list, or the tensor itself. c10d's lists date from when a rank had several devices."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(tensors) != 1:
        raise InvalidArgument(f"{what}: {len(tensors)} tensors were given; one per rank is needed")
    return checked_tensor(tensors[0], what)


def checked_tensor(x: Any, what: str) -> torch.Tensor:
    """`x` detached, if it is a dense tensor with data; raises `InvalidArgument` otherwise."""
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"{what}: a torch.Tensor is needed, found {type(x).__name__}")
    check_not_wrapper(x, what)
    if x.is_quantized:
        raise InvalidArgument(f"{what}: a quantised tensor has scales of its own; pass x.dequantize() or x.int_repr()")
    if x.layout in _UNSUPPORTED or x.is_nested:
        raise InvalidArgument(f"{what}: a dense tensor is needed, found layout {x.layout}; pass x.to_dense()")
    if x.device.type == "meta":
        raise InvalidArgument(f"{what}: a meta tensor has no data; materialise it first")
    return x.detach() if x.requires_grad else x


def tensor_list(tensors: Any, what: str, length: int) -> list[torch.Tensor]:
    """One tensor per rank; c10d wraps the list in another one."""
    tensors = list(tensors)
    if len(tensors) == 1 and isinstance(tensors[0], list | tuple):
        tensors = list(tensors[0])
    if len(tensors) != length:
        raise InvalidArgument(f"{what}: a list of {length} tensors is needed, one per rank; found {len(tensors)}")
    return [checked_tensor(x, f"{what}[{i}]") for i, x in enumerate(tensors)]


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().contiguous().view(-1)


def _flat_output(x: torch.Tensor, what: str) -> torch.Tensor:
    if not x.is_contiguous() or x.is_neg() or x.is_conj():
        raise InvalidArgument(f"{what}: the output is not contiguous, or a negated view; copy from one that is neither")
    return x.data.view(-1)


def _put(out: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy without autograd's notice, as NCCL writes: `data` has a version counter of its own."""
    out.data.copy_(flat.view(out.shape))


def _scatter_to(outs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Each output gets its part of `flat`."""
    for out, part in zip(outs, flat.split([out.numel() for out in outs]), strict=True):
        _put(out, part)


def in_place(collective: str, x: torch.Tensor, op: str = "none", root: int = -1, result: Any = None) -> GroupCall:
    """all_reduce, broadcast, reduce: one tensor, in place, of any strides."""
    arguments.check_writable(x, collective)
    if op != "none":
        check_reduction(op, x.dtype, collective)
    flat = _flat(x.data)
    call = GroupCall(collective, flat, flat, op, root, count=x.numel(), device=x.device, keep=[x, flat])
    call.result = [x] if result is None else result
    if flat.data_ptr() != x.data_ptr() and x.numel():
        call.finish = lambda: _put(x, flat)
    return call


def barrier(device: torch.device) -> GroupCall:
    return GroupCall("barrier", device=device)


def all_gather_list(outs: list[torch.Tensor], x: torch.Tensor, rank: int, result: Any) -> GroupCall:
    """all_gather into a list. Its tensors may differ in size: each rank gives as many elements as its own has."""
    what = "all_gather"
    arguments.check_alike(what, x, *outs)
    for out in outs:
        arguments.check_writable(out, what)
    sizes = tuple(out.numel() for out in outs)
    if sizes[rank] != x.numel():
        raise InvalidArgument(
            f"{what}: this rank gives {x.numel()} elements, and its place in the output list has {sizes[rank]}"
        )
    flat = torch.empty(sum(sizes), dtype=x.dtype, device=x.device)
    even = len(set(sizes)) == 1
    return GroupCall(
        "all_gather" if even else "all_gather_v",
        _flat(x),
        flat,
        count=x.numel() if even else 0,
        sizes=() if even else sizes,
        result=result,
        finish=partial(_scatter_to, outs, flat),
        device=x.device,
        keep=[x, flat, *outs],
    )


def all_gather_single(
    out: torch.Tensor, x: torch.Tensor, world_size: int, handle: Symmetric | None = None
) -> GroupCall:
    """all_gather into one tensor."""
    what = "all_gather_into_tensor"
    arguments.check_alike(what, x, out)
    arguments.check_size(what, "output", out, world_size * x.numel(), f"{world_size} ranks with {x.numel()} each")
    flat = _flat_output(out, what)
    return GroupCall(
        "all_gather", _flat(x), flat, count=x.numel(), result=[out], device=x.device, keep=[x, out], handle=handle
    )


def reduce_scatter_list(out: torch.Tensor, parts: list[torch.Tensor], op: str, rank: int) -> GroupCall:
    """reduce_scatter from a list, of tensors of any sizes."""
    what = "reduce_scatter"
    arguments.check_alike(what, out, *parts)
    arguments.check_writable(out, what)
    check_reduction(op, out.dtype, what)
    sizes = tuple(part.numel() for part in parts)
    if sizes[rank] != out.numel():
        raise InvalidArgument(f"{what}: the output has {out.numel()} elements, this rank's input {sizes[rank]}")
    even = len(set(sizes)) == 1
    into = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    return GroupCall(
        what if even else "reduce_scatter_v",
        torch.cat([_flat(p) for p in parts]),
        into,
        op,
        count=sum(sizes) if even else 0,
        sizes=() if even else sizes,
        result=[out],
        device=out.device,
        finish=lambda: _put(out, into),
        keep=[out, into, *parts],
    )


def reduce_scatter_single(
    out: torch.Tensor, x: torch.Tensor, op: str, world_size: int, handle: Symmetric | None = None
) -> GroupCall:
    """reduce_scatter from one tensor."""
    what = "reduce_scatter_tensor"
    arguments.check_alike(what, x, out)
    check_reduction(op, x.dtype, what)
    arguments.check_size(
        what, "input", x, world_size * out.numel(), f"{world_size} ranks with an output of {out.numel()}"
    )
    flat = _flat_output(out, what)
    return GroupCall(
        "reduce_scatter", _flat(x), flat, op, count=x.numel(), result=[out], device=x.device, keep=[x, out],
        handle=handle,
    )  # fmt: skip


def gather(outs: list[torch.Tensor], x: torch.Tensor, root: int) -> GroupCall:
    """gather; `outs` is empty on all ranks but `root`."""
    arguments.check_alike("gather", x, *outs)
    for out in outs:
        arguments.check_writable(out, "gather")
    for i, out in enumerate(outs):
        if out.numel() != x.numel():
            raise InvalidArgument(f"gather: output {i} has {out.numel()} elements, the input {x.numel()}")
    call = GroupCall(
        "gather", _flat(x), None, root=root, count=x.numel(), result=[outs], device=x.device, keep=[x, *outs]
    )
    if outs:
        flat = torch.empty(len(outs) * x.numel(), dtype=x.dtype, device=x.device)
        call.out = flat
        call.keep.append(flat)
        call.finish = partial(_scatter_to, outs, flat)
    return call


def scatter(out: torch.Tensor, parts: list[torch.Tensor], root: int) -> GroupCall:
    """scatter; `parts` is empty on all ranks but `root`."""
    arguments.check_alike("scatter", out, *parts)
    arguments.check_writable(out, "scatter")
    for i, part in enumerate(parts):
        if part.numel() != out.numel():
            raise InvalidArgument(f"scatter: input {i} has {part.numel()} elements, the output {out.numel()}")
    into = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    x = torch.cat([_flat(p) for p in parts]) if parts else None
    return GroupCall(
        "scatter",
        x,
        into,
        root=root,
        count=out.numel(),
        result=[out],
        device=out.device,
        finish=lambda: _put(out, into),
        keep=[out, into, *parts],
    )


def all_to_all_lists(outs: list[torch.Tensor], parts: list[torch.Tensor]) -> GroupCall:
    """all_to_all of lists, of tensors of any sizes."""
    arguments.check_alike("all_to_all", outs[0], *outs, *parts)
    for out in outs:
        arguments.check_writable(out, "all_to_all")
    sent, received = [p.numel() for p in parts], [o.numel() for o in outs]
    flat = torch.empty(sum(received), dtype=outs[0].dtype, device=outs[0].device)
    return GroupCall(
        "all_to_all_v",
        torch.cat([_flat(p) for p in parts]),
        flat,
        splits=(sent, received),
        result=list(outs),
        finish=partial(_scatter_to, outs, flat),
        device=flat.device,
        keep=[flat, *outs, *parts],
    )


def all_to_all_single(
    out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], world_size: int
) -> GroupCall:
    """all_to_all of one tensor, in rows of dimension 0; without splits, in equal parts."""
    what = "all_to_all_single"
    arguments.check_alike(what, x, out)
    flat = _flat_output(out, what)
    received = _elements_by_rank(out, out_splits, world_size, f"{what} output")
    sent = _elements_by_rank(x, in_splits, world_size, f"{what} input")
    return GroupCall(
        "all_to_all_v", _flat(x), flat, splits=(sent, received), result=[out], device=x.device, keep=[x, out]
    )


def _elements_by_rank(x: torch.Tensor, splits: Sequence[int], world_size: int, what: str) -> list[int]:
    """Elements per rank."""
    rows = x.shape[0] if x.dim() else 1
    if not len(splits):
        if rows % world_size:
            raise InvalidArgument(f"{what}: {rows} rows cannot be split evenly over {world_size} ranks; give splits")
        splits = [rows // world_size] * world_size
    if len(splits) != world_size or any(n < 0 for n in splits) or sum(splits) != rows:
        raise InvalidArgument(
            f"{what}: splits {list(splits)} do not fit {rows} rows and {world_size} ranks: one number per rank is "
            "needed, and they add up to the rows"
        )
    row = math.prod(x.shape[1:])
    return [n * row for n in splits]
