"""One form for all calls of c10d: flat tensors, an operation, a root.

c10d accepts tensors, lists of tensors and lists of lists, options or their short forms. Each function here turns these
into one `GroupCall`, or raises. Everything is checked before anything is sent, so a refused call leaves the group
usable.
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
    """`x` and `out` are contiguous, 1-dimensional and detached; in an in-place collective they are the same tensor. If
    the caller passed lists with a tensor for each rank, they are `parts` and `outs` instead. Messages use these lists;
    `flatten` makes one tensor of each.

    `splits` are (elements sent to each rank, elements received from each). `prepare` is called just before the call is
    made, `finish` copies the result to the caller's tensors. `result` is the value of the future: the caller's list.
    `count` is the number of elements of the input, of the root's if there is one. `fused` is the fused call of which an
    all_reduce is a part: kernels run all of it; after an all_reduce by another backend, `finish` does the rest.
    `handle` is symmetric memory that contains the larger tensor of an all_gather or a reduce_scatter, if the peers can
    read it. `wire`: how the kernels quantise an all_reduce on the links; no other backend may run such a call.
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
    keep: list[torch.Tensor] = field(default_factory=list)  # the caller's tensors, kept alive while a stream uses them
    fused: FusedCall | None = None
    handle: Symmetric | None = None
    wire: str | None = None
    parts: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype | None:
        tensor = self.x if self.x is not None else self.out
        if tensor is None:
            rows = self.parts or self.outs
            return rows[0].dtype if rows else None
        return tensor.dtype

    def inputs(self) -> list[torch.Tensor]:
        return self.parts or ([] if self.x is None else [self.x])

    def outputs(self) -> list[torch.Tensor]:
        return self.outs or ([] if self.out is None else [self.out])

    def flatten(self) -> GroupCall:
        """Make one tensor of each list; returns the call."""
        if self.parts:
            self.x, self.parts = torch.cat(self.parts), []
            self.keep.append(self.x)
        if self.outs:
            outs, before = self.outs, self.finish
            out = self.out = outs[0].new_empty(sum(part.numel() for part in outs))
            self.keep.append(out)

            def finish() -> None:
                for part, row in zip(outs, out.split([part.numel() for part in outs]), strict=True):
                    put(part, row)
                before()

            self.finish, self.outs = finish, []
        return self

    @property
    def nbytes(self) -> int | None:
        """Input bytes of one rank; None if they may differ between ranks."""
        if self.splits is not None or self.sizes:
            return None
        return 0 if self.dtype is None else self.count * self.dtype.itemsize

    @property
    def facts(self) -> tuple[str, torch.dtype | None, str, int | None, bool]:
        """The arguments of `Router.choice`, the same on all ranks."""
        return self.collective, self.dtype, self.op, self.nbytes, self.wire is not None

    @property
    def shape(self) -> tuple[Any, ...]:
        """The values on which the call's record depends."""
        return *self.facts, self.count, self.root, self.sizes, self.fused and self.fused.epilogue

    @property
    def made(self) -> tuple[Any, ...]:
        """The fields of `Made`, for the flight recorder. Optimised for speed, because every call on a CPU needs it."""
        x = self.x
        dtype = self.dtype if x is None else x.dtype
        return self.collective, self.op, dtype, self.count, self.root, self.sizes, self.splits

    def text(self) -> str:
        """Everything that must be the same on all ranks, in words."""
        words = [self.collective]
        if self.fused is not None:
            words = [FUSED, self.fused.epilogue.text()]
        elif self.op != "none":
            words.append(f"op={self.op}")
        if self.wire is not None:
            words.append(f"wire={self.wire}")
        if self.dtype is not None:
            words.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
            words.append(
                f"sizes={list(self.sizes)}" if self.sizes else f"count={self.count}" if not self.splits else ""
            )
        if self.root >= 0:
            words.append(f"root={self.root}")
        return " ".join(word for word in words if word)

    def fingerprint(self) -> int:
        more = self.wire if self.fused is None else self.fused.epilogue
        return arguments.fingerprint(self.collective, self.op, str(self.dtype), self.count, self.root, self.sizes, more)

    def record(self, path: str) -> PackedDescriptor:
        """The control page's record of a call that the backend `path` makes instead of the kernels."""
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
    """Copy each input that shares memory with an output, so that every call of `batch` reads its present values. An
    in-place call needs no copy: the input of an all_gather is row `rank` of its output, and the output of a
    reduce_scatter row `rank` of its input."""
    if len(batch) == 1 and (batch[0].x is batch[0].out is not None or batch[0].device.type != "cpu"):
        return
    outputs = [(call, out) for call in batch for out in call.outputs()]
    first = min((out.data_ptr() for _, out in outputs), default=0)
    last = max((out.data_ptr() + out.nbytes for _, out in outputs), default=0)
    for call in batch:
        for place, x in enumerate(call.inputs()):
            apart = x.data_ptr() >= last or x.data_ptr() + x.nbytes <= first
            if apart or not any(
                arguments.overlap(x, out) for other, out in outputs if not _in_place(call, x, other, out, rank)
            ):
                continue
            copy = x.clone()
            call.keep.append(copy)
            if call.parts:
                call.parts[place] = copy
                continue
            if call.out is x:
                call.out = copy
                call.finish = partial(put, x, copy)
            call.x = copy


def _in_place(call: GroupCall, x: torch.Tensor, other: GroupCall, out: torch.Tensor, rank: int) -> bool:
    """Whether `call` and `other` are the same call, and its input `x` and output `out` may share memory because it
    works in place."""
    if call is not other:
        return False
    if call.parts or call.outs:  # row `rank` of a list may be the other tensor, or row `rank` of the other list
        mine = (not call.parts or x is call.parts[rank]) and (not call.outs or out is call.outs[rank])
        return mine and x.data_ptr() == out.data_ptr() and x.numel() == out.numel()
    if call.splits is not None:
        return False
    part, whole = (x, out) if x.numel() < out.numel() else (out, x)
    return part.data_ptr() == whole.data_ptr() + (x.numel() != out.numel()) * rank * part.nbytes


def single_tensor(tensors: Any, what: str) -> torch.Tensor:
    """The only tensor of a list, or the tensor itself. c10d has lists because a rank once had several devices."""
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
        raise InvalidArgument(f"{what}: a quantised tensor also has scales; pass x.dequantize() or x.int_repr()")
    if x.layout in _UNSUPPORTED or x.is_nested:
        raise InvalidArgument(f"{what}: a dense tensor is needed, found layout {x.layout}; pass x.to_dense()")
    if x.device.type == "meta":
        raise InvalidArgument(f"{what}: a meta tensor has no data; materialise it first")
    return x.detach() if x.requires_grad else x


def flattened(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().contiguous().view(-1)


def _check_flat(x: torch.Tensor, what: str) -> None:
    if not x.is_contiguous() or x.is_neg() or x.is_conj():
        raise InvalidArgument(f"{what}: the output is not contiguous, or a negated view; copy from one that is neither")


def put(out: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy without autograd noticing, as NCCL writes: `data` has a separate version counter."""
    out.data.copy_(flat.view(out.shape))


def in_place(collective: str, x: torch.Tensor, op: str = "none", root: int = -1, result: Any = None) -> GroupCall:
    """all_reduce, broadcast, reduce: one tensor, in place, of any strides."""
    arguments.check_writable(x, collective)
    if op != "none":
        check_reduction(op, x.dtype, collective)
    flat = flattened(x.data)
    call = GroupCall(collective, flat, flat, op, root, count=x.numel(), device=x.device, keep=[x, flat])
    call.result = [x] if result is None else result
    if flat.data_ptr() != x.data_ptr() and x.numel():
        call.finish = lambda: put(x, flat)
    return call


Tensors = torch.Tensor | list[torch.Tensor]  # one, or one for each rank


def call_of(collective: str, given: Tensors, outs: Tensors, **facts: Any) -> GroupCall:
    """The call that reads `given` and writes `outs`, which have been checked and may have any strides. On a GPU lists
    are flattened to single tensors for kernels and NCCL."""
    inputs = given if isinstance(given, list) else [given]
    outputs = outs if isinstance(outs, list) else [outs]
    first = inputs[0] if inputs else outputs[0]
    call = GroupCall(collective, device=first.device, keep=[*inputs, *outputs], **{"result": outputs, **facts})
    if isinstance(given, list):
        call.parts = [flattened(part) for part in given]
    else:
        call.x = flattened(given)
    if isinstance(outs, list):
        _write_rows(call, outs)
    else:
        row = call.out = flattened(outs.data)
        if row.data_ptr() != outs.data_ptr() and outs.numel():
            call.finish = partial(put, outs, row)
    return call if call.device.type == "cpu" else call.flatten()


def _write_rows(call: GroupCall, outs: list[torch.Tensor]) -> None:
    rows = call.outs = [flattened(out.data) for out in outs]
    ends = sorted((row.data_ptr(), row.data_ptr() + row.nbytes) for row in rows if row.numel())
    apart = all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))
    if apart and all(row.data_ptr() == out.data_ptr() for row, out in zip(rows, outs, strict=True) if row.numel()):
        return
    rows = call.outs = [row.new_empty(row.numel()) for row in rows]

    def finish() -> None:
        for out, row in zip(outs, rows, strict=True):  # if outputs overlap, the last one is written last
            put(out, row)

    call.finish = finish


def barrier(device: torch.device) -> GroupCall:
    return GroupCall("barrier", device=device)


def all_gather_single(
    out: torch.Tensor, x: torch.Tensor, world_size: int, handle: Symmetric | None = None
) -> GroupCall:
    """all_gather into one tensor."""
    what = "all_gather_into_tensor"
    arguments.check_alike(what, x, out)
    arguments.check_size(what, "output", out, world_size * x.numel(), f"{world_size} ranks with {x.numel()} each")
    _check_flat(out, what)
    return call_of("all_gather", x, out, count=x.numel(), handle=handle)


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
    _check_flat(out, what)
    return call_of("reduce_scatter", x, out, op=op, count=x.numel(), handle=handle)


def all_to_all_single(
    out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], world_size: int
) -> GroupCall:
    """all_to_all of one tensor, in rows of dimension 0; without splits, in equal parts."""
    what = "all_to_all_single"
    arguments.check_alike(what, x, out)
    _check_flat(out, what)
    received = _elements_by_rank(out, out_splits, world_size, f"{what} output")
    sent = _elements_by_rank(x, in_splits, world_size, f"{what} input")
    return call_of("all_to_all_v", x, out, splits=(sent, received))


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
