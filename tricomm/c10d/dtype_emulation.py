"""Reductions on the CPU, of every dtype of torch, with the same bits as the kernels'.

They are in ascending rank order; 8- and 16-bit types are accumulated in 32 bits and rounded once
(kernels/reference.py). A type in which torch cannot compute is emulated by one that contains all of its values: uint16
by int32, uint32 by int64, uint64 by the bits of int64, bool by bytes. The sum of bools means "any", as in NCCL. Data
that is only moved is handled as bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tricomm.errors import InvalidArgument

_F8 = tuple(dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype))
_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, *_F8), torch.float32),
    torch.complex32: torch.complex64,
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.uint16), torch.int32),
    torch.uint32: torch.int64,
}
_PLAIN = (torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128)
_BOOL_OPS = {"sum": "bor", "max": "bor", "min": "band", "prod": "band", "band": "band", "bor": "bor", "bxor": "bxor"}
_BITWISE = frozenset({"band", "bor", "bxor"})
_IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "prod": torch.Tensor.mul_,
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}
_SCALED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # by `PREMUL_SUM`
_SIGN = -(1 << 63)
_E4M3_MOST = 448.0  # e4m3fn has no infinity
_WRITABLE = 0x200  # PyBUF_WRITE
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype, _memory_at.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_BLOCK = 32768  # elements that stay in the cache, and too few for torch to start threads


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous 1-dimensional tensor's memory as bytes."""
    # One element, or none, is contiguous with any stride, but `view` checks the stride.
    return (x.as_strided((x.numel(),), (1,)) if x.numel() <= 1 else x).view(torch.uint8)


def memory(x: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor; the caller keeps the tensor.

    `Tensor.numpy()` would forbid to resize its storage, as FSDP does.
    """
    view: memoryview = _memory_at(x.data_ptr(), x.nbytes, _WRITABLE)
    return view


def check_reduction(op: str, dtype: torch.dtype, what: str) -> None:
    """Raises `InvalidArgument` for an operation that no backend supports for `dtype`."""
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise InvalidArgument(f"{what}: {op} needs an integer or bool tensor, found {dtype}")
    if dtype == torch.bool and op not in _BOOL_OPS:
        raise InvalidArgument(f"{what}: {op} of bool is not defined; use sum (any), min (all) or an integer tensor")
    if dtype.is_complex and op in ("min", "max"):
        raise InvalidArgument(f"{what}: {op} of {dtype} is not defined; complex numbers have no order")


def factor_of(op: Any, dtype: torch.dtype, what: str) -> Any:
    """The factor of a `PREMUL_SUM`. Raises `InvalidArgument` for a type that NCCL does not scale either, and if the
    factor is not one real number on the CPU."""
    if dtype not in _SCALED:
        raise InvalidArgument(f"{what}: PREMUL_SUM of {dtype} is not defined; use a float tensor, or scale it and sum")
    factor = op.__getstate__()[1]
    if not isinstance(factor, torch.Tensor):
        return factor
    if factor.device.type != "cpu" or factor.is_complex() or factor.numel() != 1:
        raise InvalidArgument(f"{what}: PREMUL_SUM needs one real factor on the CPU, found {factor!r}")
    return factor.detach().reshape(())


def premultiply(call: Any, op: Any, rank: int) -> None:
    """On the CPU, where no kernel has `PREMUL_SUM`, make it a sum of copies that `prepare` scales.

    Raises `InvalidArgument` as `factor_of` does.
    """
    if call.op == "premul_sum" and call.device.type == "cpu" and call.dtype is not None:
        call.flatten()
        factor = factor_of(op, call.dtype, call.collective)
        call.op, call.handle = "sum", None
        call.prepare = partial(_scale, call, factor, call.collective != "reduce" or call.root == rank)


def _scale(call: Any, factor: Any, receives: bool) -> None:
    """Send a scaled copy, because a tensor that is no output, or receives no result, must keep its values."""
    x, finish = call.x, call.finish
    assert x is not None
    scaled = (x * factor).to(x.dtype)
    if call.out is x:
        call.out = scaled
        call.finish = lambda: (x.copy_(scaled) if receives else x, finish())[1]
    call.x = scaled


def reduce_into(op: str, parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """Write the reduction of the ranks' 1-dimensional `parts`, in their order, to `out`, which may be one of them.

    Raises `InvalidArgument` for an operation or a type that is not defined here.
    """
    if op not in _IN_PLACE and op not in ("avg", "min", "max"):
        raise InvalidArgument(f"{op} is not defined on the CPU; there is {', '.join(_IN_PLACE)}, avg, min and max")
    if out.dtype.is_complex and op in ("sum", "avg"):
        # By parts, as in the kernels: torch's complex sum makes the other part of an infinity a NaN.
        parts, out = [_halves(part) for part in parts], _halves(out)
    dtype = out.dtype
    if dtype == torch.bool:
        op, parts, out = _BOOL_OPS[op], [as_bytes(part) for part in parts], as_bytes(out)
    elif dtype == torch.uint64:
        parts, out = [part.view(torch.int64) for part in parts], out.view(torch.int64)
    elif dtype not in _PLAIN and dtype not in _WIDE:
        raise InvalidArgument(f"{op} of {dtype} is not defined on the CPU; convert the tensor")
    if out.numel() <= _BLOCK:
        _block(op, parts, out, dtype)
        return
    for block in zip(out.split(_BLOCK), *(part.split(_BLOCK) for part in parts), strict=True):
        _block(op, list(block[1:]), block[0], dtype)


def _halves(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x).view(-1)


def _block(op: str, parts: list[torch.Tensor], out: torch.Tensor, dtype: torch.dtype) -> None:
    flip = dtype == torch.uint64 and op in ("min", "max")  # the sign bit turns unsigned order into signed order
    wide = _WIDE.get(dtype) if dtype != torch.bool else None
    if op == "sum" and wide is None and len(parts) > 1 and all(out.data_ptr() != part.data_ptr() for part in parts[2:]):
        torch.add(parts[0], parts[1], out=out)  # without a copy
        for part in parts[2:]:
            out.add_(part)
        return
    total = parts[0] ^ _SIGN if flip else parts[0].to(wide) if wide else parts[0].clone()
    apply = _IN_PLACE.get("sum" if op == "avg" else op)
    for part in parts[1:]:
        other = part ^ _SIGN if flip else part.to(wide) if wide else part
        if apply is not None:
            apply(total, other)
        else:
            total = _extreme(op, total, other)
    if op == "avg":
        total = _mean(total, len(parts), dtype)
    if flip:
        total ^= _SIGN
    if wide is not None and not dtype.is_signed and not dtype.is_floating_point:
        total &= (1 << 8 * dtype.itemsize) - 1
    if dtype == torch.float8_e4m3fn:
        total.clamp_(-_E4M3_MOST, _E4M3_MOST)
    out.copy_(total)


def _extreme(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """min or max. -0 is less than +0; torch does not define that."""
    result = torch.minimum(a, b) if op == "min" else torch.maximum(a, b)
    if a.dtype.is_floating_point:
        zero = result == 0
        if zero.any():
            signs = torch.signbit(a), torch.signbit(b)
            negative = signs[0] | signs[1] if op == "min" else signs[0] & signs[1]
            nought = torch.zeros((), dtype=a.dtype, device=a.device)
            result = torch.where(zero, torch.where(negative, -nought, nought), result)
    return result


def _mean(total: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.uint64:  # torch does not divide unsigned 64-bit numbers
        return torch.from_numpy((total.numpy().view("uint64") // count).view("int64"))
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return total.div_(count, rounding_mode="trunc" if whole else None)
