"""Helpers of the c10d tests: a default group on either CPU route, inputs that differ by rank, poisoned outputs."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import tricomm

ROUTES = ("gloo", "kernels")
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIGNED, UNSIGNED = ([getattr(torch, f"{kind}{bits}") for bits in (64, 32, 16, 8)] for kind in ("int", "uint"))
TYPES = [*FLOATS, *SIGNED, *reversed(UNSIGNED), torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]


@contextmanager
def default_group(rank, world_size, url, route="gloo", backend="tricomm", timeout=60.0, options=None):
    """`dist.init_process_group` with these `tricomm.Options`, CPU tensors on `route`; destroyed in the end."""
    os.environ["TRICOMM_CPU"] = route
    os.environ["TRICOMM_ARENA_BYTES"] = str(256 * 1024)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        backend, init_method=url, rank=rank, world_size=world_size, timeout=limit, pg_options=options
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def of(rank, shape, dtype=torch.float32, call=0):
    """Small integers, different on every rank and in every call; exact in every type and order of summation."""
    generator = torch.Generator().manual_seed(call * 1009 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64) else -3
    return torch.randint(low, 4, shape, generator=generator).to(dtype)


def poisoned(shape, dtype=torch.float32):
    if dtype.is_floating_point:
        return torch.full(shape, 99.0).to(dtype)
    return torch.ones(shape, dtype=dtype) if dtype == torch.bool else torch.full(shape, 99).to(dtype)


def same(a, b):
    """Bit for bit; torch.equal lacks some unsigned and 8-bit types."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
    )


def wanted(parts, op, dtype):
    """The reduction, in numbers that hold it exactly."""
    if dtype == torch.bool:
        fold = {
            "SUM": torch.logical_or,
            "MAX": torch.logical_or,
            "BOR": torch.logical_or,
            "MIN": torch.logical_and,
            "PRODUCT": torch.logical_and,
            "BAND": torch.logical_and,
            "BXOR": torch.logical_xor,
        }[op]
        wide = parts
    else:
        wide = [p.to(torch.float64 if dtype.is_floating_point else torch.int64) for p in parts]
        fold = {
            "SUM": torch.add,
            "AVG": torch.add,
            "MIN": torch.minimum,
            "MAX": torch.maximum,
            "PRODUCT": torch.mul,
            "BAND": torch.bitwise_and,
            "BOR": torch.bitwise_or,
            "BXOR": torch.bitwise_xor,
        }[op]
    total = wide[0]
    for part in wide[1:]:
        total = fold(total, part)
    if op == "AVG":
        total = total.div(len(parts), rounding_mode=None if dtype.is_floating_point else "trunc")
    return total.to(dtype)


def defined(op, dtype):
    if dtype == torch.bool:
        return op != "AVG"
    return not (dtype.is_floating_point and op[0] == "B")


def refused(call, *words, kind=tricomm.InvalidArgument):
    """`call` raises `kind`, whose text has all `words`."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
        return str(error)
    raise AssertionError(f"not refused: {words}")
