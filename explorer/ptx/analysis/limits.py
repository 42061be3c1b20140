"""The limits of a launch by architecture. A launch beyond a limit is refused with the limit's name, as by a driver."""

from __future__ import annotations

import math
import re

from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.instructions import PtxKernel

KIB = 1024
# KiB of shared memory that one block may have (CUDA C++ Programming Guide, "Technical Specifications").
SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
THREADS = 1024
BLOCK = (1024, 1024, 64)
GRID = (2**31 - 1, 65535, 65535)
REGISTERS = 65536
MOST_REGISTERS = 255
PARAMETERS = 32764

Dimensions = tuple[int, int, int]


def capability(architecture: str) -> int:
    """90 for "sm_90" and "sm_90a". Raises `InvalidArgument` for an architecture that Triton does not compile for.

    LLVM ends the process if it is given an architecture that it does not know.
    """
    match = re.fullmatch(r"sm_(\d+)[af]?", architecture)
    number = int(match[1]) if match else 0
    if number not in SHARED:
        known = ", ".join(f"sm_{n}" for n in SHARED)
        raise InvalidArgument(f"{architecture!r} is no architecture that Triton compiles for; there is {known}")
    return number


def check_launch(
    kernel: PtxKernel, grid: Dimensions, threads: Dimensions, shared: int, registers: int | None = None
) -> None:
    """Raises `InvalidArgument` if no GPU of the kernel's architecture could run this launch.

    `shared` is the dynamic shared memory in bytes, `registers` their number in a thread, if known.
    """
    limit = SHARED[capability(kernel.target)] * KIB
    _check_dimensions(kernel, "grid", grid, GRID)
    _check_dimensions(kernel, "block", threads, BLOCK)
    number = math.prod(threads)
    _check(kernel, "threads in a block", number, min(kernel.most or THREADS, THREADS))
    if kernel.threads is not None:
        _check(kernel, "threads in .reqntid", math.prod(kernel.threads), THREADS)
        if kernel.threads != threads:
            raise InvalidArgument(f"{kernel.name}: a block of {threads} threads; .reqntid asks for {kernel.threads}")
    static = static_shared(kernel)
    if shared < 0:
        raise InvalidArgument(f"{kernel.name}: {shared} bytes of shared memory; it cannot be negative")
    _check(kernel, f"bytes of shared memory ({static} static) on {kernel.target}", static + shared, limit)
    if kernel.max_registers is not None:
        _check(kernel, "registers a thread in .maxnreg", kernel.max_registers, MOST_REGISTERS)
    if registers is not None:
        _check(kernel, "registers a thread", registers, MOST_REGISTERS)
        # Registers are allocated by warp, in units of 8 per thread.
        _check(kernel, "registers of a block", -(-registers // 8) * 8 * -(-number // 32) * 32, REGISTERS)
    last = kernel.parameters[-1] if kernel.parameters else None
    _check(kernel, "bytes of parameters", last.offset + last.size if last else 0, PARAMETERS)


def static_shared(kernel: PtxKernel) -> int:
    """Bytes of a kernel's shared variables, which are placed one after the other."""
    end = 0
    for variable in kernel.variables.values():
        if variable.space == "shared":
            end = -(-end // variable.align) * variable.align + variable.size
    return end


def _check_dimensions(kernel: PtxKernel, name: str, asked: Dimensions, limits: Dimensions) -> None:
    if any(n < 1 or n > limit for n, limit in zip(asked, limits, strict=True)):
        raise InvalidArgument(f"{kernel.name}: a {name} of {asked}; each must be from 1 to {limits}")


def _check(kernel: PtxKernel, name: str, asked: int, limit: int) -> None:
    if asked > limit:
        raise InvalidArgument(f"{kernel.name}: {asked:,} {name}; there may be {limit:,}")
