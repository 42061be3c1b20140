"""The arguments of a call: their checks, the name of the operation, and the call's fingerprint."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch._C._dynamo import guards

from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels.dtypes import DTYPES as _NAMED
from tricomm.kernels.dtypes import OPS

DTYPES = {getattr(torch, name): dtype for name, dtype in _NAMED.items()}
_OPS = frozenset(OPS)
REDUCE_OPS = {  # torch's names and tricomm's
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
_REDUCE_OPS = {getattr(dist.ReduceOp, theirs): ours for theirs, ours in REDUCE_OPS.items()}


def operation(op: Any) -> str:
    """The name of a reduction given as a string or a `torch.distributed.ReduceOp`; raises `InvalidArgument`."""
    if type(op) is str and op in _OPS:
        return op
    if isinstance(op, str):
        name: str | None = op.lower()
    else:
        kind = getattr(op, "op", op)
        name = _REDUCE_OPS.get(kind) if isinstance(kind, dist.ReduceOp.RedOpType) else None
    if name not in _OPS:
        raise InvalidArgument(f"op={op!r} is not supported; there is {', '.join(OPS)}")
    return name


def check_tensor(x: Any, device: torch.device, what: str) -> None:
    """Raises `InvalidArgument`, before anything is sent, for a tensor that no backend supports.

    `policy.backend_choice` decides which backend supports its dtype, if any.
    """
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"{what}: a torch.Tensor is needed, found {type(x).__name__}")
    if type(x) is not torch.Tensor and type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise InvalidArgument(
            f"{what}: a {type(x).__name__} wraps other tensors; pass the plain one, as x.to_local() has"
        )
    if x.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise InvalidArgument(f"{what}: a nested or transformed (vmap, grad) tensor was given; a plain one is needed")
    if x.layout != torch.strided or x.is_quantized:
        raise InvalidArgument(f"{what}: a dense tensor is needed, found layout {x.layout}; pass x.to_dense()")
    if x.is_conj() or x.is_neg():
        raise InvalidArgument(
            f"{what}: a lazily conjugated or negated view was given; pass x.resolve_conj()/resolve_neg()"
        )
    if x.device.type == "meta":
        raise InvalidArgument(f"{what}: a meta tensor has no data")
    if x.device != device:
        text = f"{what}: the tensor is on {x.device}, this communicator is on {device}"
        if x.device.type == device.type == "cuda":
            text += f"; make the tensor there, or call torch.cuda.set_device({device.index}) before you make it"
        raise InvalidArgument(text)
    if x.untyped_storage().nbytes() < (x.storage_offset() + _extent(x)) * x.itemsize:
        raise InvalidArgument(f"{what}: the tensor's storage was freed or shrunk under it (resize_)")
    if x.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{what}: the tensor requires grad and collectives are not differentiable; pass x.detach()"
        )


def look(*tensors: torch.Tensor, uneven: bool = False) -> Callable[..., bool]:
    """A function that checks in one C call whether other tensors are like `tensors`, which have passed the checks of
    this module: in type, dtype, device, shape, strides, kind (sparse, negated, wrapped, inference), requires_grad, and
    modes of the caller. It checks neither the amount of memory nor its address, and with `uneven` not dimension 0."""
    shapes: list[Any] = [[None, *t.shape[1:]] if uneven else list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


def allocator(like: torch.Tensor, uneven: bool = False) -> Callable[..., torch.Tensor]:
    """A function that allocates contiguous tensors like `like` on the current device, in half the time of
    `torch.empty`. With `uneven` its argument is the size of dimension 0."""
    shape, strides, dtype = tuple(like.shape), tuple(like.stride()), like.dtype
    make = getattr(guards, f"_empty_strided_{like.device.type}")
    if uneven:
        return lambda rows: make((rows, *shape[1:]), strides, dtype)
    return partial(make, shape, strides, dtype)


def allocated(what: str, make: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    """`make(*args, **options)`, which allocates memory before a call is sent. Raises `ResourceError` if that fails; the
    group stays usable, and a corrected call of this rank joins the peers that wait."""
    try:
        return make(*args, **options)
    except (RuntimeError, MemoryError) as error:
        codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
        if codes - {allocated.__code__, getattr(make, "__code__", None)}:  # a signal handler's
            raise
        raise ResourceError(
            f"{what}: torch cannot allocate memory: {str(error).splitlines()[0]}; nothing was sent, so the group is "
            "still usable: free memory, or pass smaller tensors"
        ) from error


def check_writable(x: torch.Tensor, what: str) -> None:
    """Raises `InvalidArgument` for an output that has several elements in the same memory."""
    if x.is_contiguous():
        return
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride <= reach:
            raise InvalidArgument(f"{what}: elements of the tensor share memory (expanded?); pass x.contiguous()")
        reach += stride * (size - 1)


def check_alike(what: str, x: torch.Tensor, *others: torch.Tensor) -> None:
    for other in others:
        if other.dtype != x.dtype:
            raise InvalidArgument(f"{what}: tensors of {x.dtype} and {other.dtype} are mixed; give one dtype")
        if other.device != x.device:
            raise InvalidArgument(
                f"{what}: tensors on {x.device} and {other.device} are mixed; move them to one device"
            )


def check_size(what: str, name: str, x: torch.Tensor, numel: int, because: str) -> None:
    if x.numel() != numel:
        raise InvalidArgument(f"{what}: the {name} has {x.numel()} elements; {because} need {numel}")


def _extent(x: torch.Tensor) -> int:
    """The number of elements between the first and the last one in memory, both included."""
    if x.is_contiguous():
        return x.numel()
    return 0 if x.numel() == 0 else 1 + sum(s * (n - 1) for s, n in zip(x.stride(), x.shape, strict=True))


def check_output(out: torch.Tensor, shape: tuple[int, ...], x: torch.Tensor, what: str) -> None:
    """Raises `InvalidArgument` for an output of another shape or dtype, or one that is not contiguous."""
    if out.dtype != x.dtype:
        raise InvalidArgument(f"{what}: out has dtype {out.dtype}, the input {x.dtype}")
    if tuple(out.shape) != shape:
        raise InvalidArgument(f"{what}: out has shape {tuple(out.shape)}, expected {shape}")
    if not out.is_contiguous():
        raise InvalidArgument(f"{what}: out is not contiguous; pass a contiguous tensor and copy from it")


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory ranges from the first to the last element of `a` and of `b` overlap."""
    ends = [x.data_ptr() + _extent(x) * x.itemsize for x in (a, b)]
    return a.data_ptr() < ends[1] and b.data_ptr() < ends[0]


def check_apart(part: torch.Tensor, whole: torch.Tensor, what: str, row: int | None) -> None:
    """Raises `InvalidArgument` for an output that overlaps the input. In-place calls are allowed: `part`, the tensor
    with fewer rows, may be row `row` of `whole` (None: it may not)."""
    contiguous = part.is_contiguous() and whole.is_contiguous()
    in_place = row is not None and part.data_ptr() == whole.data_ptr() + row * part.nbytes and contiguous
    if not in_place and overlap(part, whole):
        where = "" if row is None else f", or row {row} of the larger one itself"
        raise InvalidArgument(f"{what}: out overlaps the input; pass separate memory{where}")


def fingerprint(*facts: Any) -> int:
    """32 bits that differ if two ranks make different calls: collective, op, dtype, count, kernel, grid, mode."""
    return zlib.crc32(repr(facts).encode())


def members(ranks: object, world_size: int) -> tuple[tuple[int, ...], InvalidArgument | None]:
    """The ranks of a split, and the error if they are invalid, else None."""
    chosen = tuple(ranks) if isinstance(ranks, Sequence) and not isinstance(ranks, str) else ()
    whole = all(isinstance(r, int) and not isinstance(r, bool) and 0 <= r < world_size for r in chosen)
    if not chosen or not whole or len(set(chosen)) < len(chosen):
        return (), InvalidArgument(f"split: ranks={ranks!r}: different ints from 0 to {world_size - 1} are needed")
    return chosen, None


def replaced(which: object, rank: int, world_size: int) -> frozenset[int] | None:
    """The ranks that `replace` on `rank` replaces; None: those that have ended. Raises `InvalidArgument`."""
    ranks = (which,) if isinstance(which, int) else which
    return excluded(ranks, rank, world_size, f"replace: rank={which!r}", "a rank that is replaced does not call it")


def excluded(
    exclude: object, rank: int, world_size: int, said: str = "", why: str = "an excluded rank does not call shrink"
) -> frozenset[int] | None:
    """The ranks that `shrink` on `rank` leaves out; None: those that have ended. Raises `InvalidArgument`, which begins
    with `said`."""
    said = said or f"shrink: exclude={exclude!r}"
    if exclude is None:
        return None
    chosen: tuple[Any, ...] = (None,)
    if isinstance(exclude, Collection) and not isinstance(exclude, str | bytes):
        with suppress(TypeError):  # an array without dimensions
            chosen = tuple(exclude)
    whole = all(isinstance(r, int) and not isinstance(r, bool) and 0 <= r < world_size for r in chosen)
    if not whole or len(set(chosen)) < len(chosen):
        raise InvalidArgument(f"{said}: different ints from 0 to {world_size - 1} are needed")
    if rank in chosen:
        raise InvalidArgument(f"{said}: this is rank {rank}, and {why}")
    return frozenset(chosen)
