"""Types and operations that Gloo lacks, carried by those that it has.

Data that is only moved goes as bytes. What is reduced goes as a type that holds every value: int16 as int32, an
unsigned type as the next signed one, 8-bit floats as fp32 (rounded once, at the end), bool as bytes with "sum" meaning
"any" as in NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tricomm.errors import InvalidArgument

_NATIVE = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.complex64, torch.complex128,
})  # fmt: skip
_AS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_BOOL_OPS = {"sum": "max", "max": "max", "min": "min", "prod": "min", "band": "band", "bor": "bor", "bxor": "bxor"}
_BITWISE = frozenset({"band", "bor", "bxor"})
_SIGN = -(1 << 63)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous 1-dimensional tensor's memory as bytes."""
    return x.view(torch.uint8)


def check_reduction(op: str, dtype: torch.dtype, what: str) -> None:
    """Raises `InvalidArgument` for an operation that `dtype` does not have, on any route."""
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise InvalidArgument(f"{what}: {op} needs an integer or bool tensor, found {dtype}")
    if dtype == torch.bool and op not in _BOOL_OPS:
        raise InvalidArgument(f"{what}: {op} of bool is not defined; use sum (any), min (all) or an integer tensor")
    if dtype.is_complex and op in ("min", "max"):
        raise InvalidArgument(f"{what}: {op} of {dtype} is not defined; complex numbers have no order")


def carried(
    x: torch.Tensor, op: str, world_size: int
) -> tuple[torch.Tensor, str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    """What Gloo reduces in place of `x`, with which operation, and how (reduced, target) becomes the result."""
    average = op == "avg"
    if average:
        op = "sum"

    def back(reduced: torch.Tensor, target: torch.Tensor) -> None:
        if average:
            whole = not (reduced.is_floating_point() or reduced.is_complex())
            reduced = reduced.div(world_size, rounding_mode="trunc" if whole else None)
        if reduced is not target:
            target.copy_(reduced)

    if x.dtype in _NATIVE:
        return x, op, back
    if x.dtype == torch.bool:
        return x.view(torch.uint8), _BOOL_OPS[op], lambda reduced, target: _into_bool(reduced, target)
    if x.dtype in _AS:
        return x.to(_AS[x.dtype]), op, lambda reduced, target: back(_wrapped(reduced, x.dtype), target)
    if x.dtype == torch.uint64:
        if op in ("min", "max"):  # flipping the sign bit turns unsigned order into signed order
            return x.view(torch.int64) ^ _SIGN, op, lambda reduced, target: _signed(target).copy_(reduced ^ _SIGN)
        if average:
            return x.view(torch.int64), op, lambda reduced, target: _signed(target).copy_(_divided(reduced, world_size))
        return x.view(torch.int64), op, lambda reduced, target: back(reduced, _signed(target))
    if x.dtype.is_floating_point:
        return x.float(), op, back
    raise InvalidArgument(f"{op} of {x.dtype} cannot be carried by Gloo; convert the tensor")


def _signed(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int64)


def _divided(x: torch.Tensor, world_size: int) -> torch.Tensor:
    """int64 that means uint64, divided; torch does not divide unsigned 64-bit numbers."""
    return torch.from_numpy((x.numpy().view("uint64") // world_size).view("int64"))


def _wrapped(reduced: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Modulo the range of `dtype`, in the carrying type: a sum wraps before it is averaged, as in the kernels."""
    bits = dtype.itemsize * 8
    reduced = reduced & ((1 << bits) - 1)
    if dtype.is_signed:
        reduced = torch.where(reduced >= 1 << (bits - 1), reduced - (1 << bits), reduced)
    return reduced


def _into_bool(reduced: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(reduced != 0)
