"""Compiles and launches a user's own kernel as Triton does, but on the driver of a simulated GPU."""

from __future__ import annotations

import ctypes
import io
import math
import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch

from tricomm.errors import InvalidArgument, ResourceError
from tricomm.explorer.compiled.driver import SimulatedDriver
from tricomm.explorer.compiled.module_table import table_of
from tricomm.explorer.memory_model.regions import tensors_in
from tricomm.kernels.launch import compiler, jit_dispatch, kernel_launch, triton_adapter
from tricomm.kernels.launch.cuda_launcher import driver_call
from tricomm.kernels.specialization import specialized

# Letters of `struct` for Triton's types of numbers.
_TYPES = "i1 u1 i8 u8 i16 u16 i32 u32 i64 u64 fp16 fp32 f32 fp64 f64"
_FORMATS = {kind: f"<{letter}" for kind, letter in zip(_TYPES.split(), "bbbBhHiIqQeffdd", strict=True)}
_SCRATCH = 2  # pointers that Triton adds at the end


def prepare(
    driver: SimulatedDriver, kernel: Any, grid: Any, args: Sequence[Any], constexprs: dict[str, Any]
) -> Callable[[], None]:
    """Compile and load a kernel; returns a function that enqueues it on the current stream.

    Arguments are specialised as Triton does: multiples of 16, ones, integers of 32 or 64 bits. Raises
    `InvalidArgument` if grid or arguments do not fit, `ResourceError` if Triton cannot compile the kernel.
    """
    blocks = (*kernel_launch.grid_size(grid, constexprs), 1, 1)[:3]
    known = {p.name for p in triton_adapter.parameters(kernel)}
    options = specialized(known, constexprs, compiled=True)
    with _refusing_libraries(kernel):
        compiled, values, types = jit_dispatch.compile_for(kernel, args, options, driver.capability)
    metadata = compiled.metadata
    if metadata.num_ctas != 1:
        raise InvalidArgument(
            f"{metadata.name}: num_ctas={metadata.num_ctas}: clusters of blocks are not simulated; take num_ctas=1"
        )
    if getattr(metadata, "tensordesc_meta", None):
        raise InvalidArgument(
            f"{metadata.name} takes a tensor descriptor, which sm_{driver.capability} reads by TMA: not simulated; "
            "compile for sm_80 (--compiled sm_80), where Triton makes ordinary loads and stores of it"
        )
    sizes = (metadata.global_scratch_size, metadata.profile_scratch_size)
    scratch = [torch.zeros(math.prod(blocks) * size, dtype=torch.uint8) if size else None for size in sizes]
    given = list(_flat(values, types))
    packed = [_packed(value, kind, metadata.name) for value, kind in given]
    packed += [struct.pack("<Q", 0 if s is None else s.data_ptr()) for s in scratch]
    tensors = tensors_in(([value for value, _ in given], scratch))

    def run() -> None:
        function = _function(driver, compiled)
        cells = [ctypes.create_string_buffer(value, len(value)) for value in packed]
        table = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        shape, table_at = (*blocks, metadata.num_warps * 32, 1, 1, metadata.shared), ctypes.addressof(table)
        dependent = bool(getattr(metadata, "launch_pdl", False))
        with driver.holding(tensors):
            (result,) = driver_call(driver, function, shape, driver.stream(), table_at, dependent)()
        if result != 0:
            raise ResourceError(f"cuLaunchKernel of {metadata.name} on {driver.name} failed: {result.name}")

    return run


@contextmanager
def _refusing_libraries(kernel: Any) -> Iterator[None]:
    """A context manager that replaces Triton's error about a function of a device library (such as NVSHMEM's) by
    `InvalidArgument`, without the whole PTX that Triton prints."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    except ResourceError as error:
        missing = re.search(r"Unresolved extern function '(\w+)'", str(error))
        if missing is None:
            raise
        printed = io.StringIO()
        raise InvalidArgument(
            f"kernel {kernel.__name__} calls {missing[1]}, a function of a device library: not simulated; replace the "
            "call by loads, stores and atomics on the peers' addresses"
        ) from None
    finally:
        sys.stdout.write(printed.getvalue())


def _function(driver: SimulatedDriver, compiled: Any) -> int:
    """The loaded function. It is loaded once per device and process."""
    loaded = table_of(driver.name).users  # a handle is valid in one context only
    key = (compiled.metadata.hash, compiled.metadata.name, compiled.src.fn.fn.__code__.co_filename)
    if key not in loaded:
        compiler.restored(compiled)
        result, module = driver.cuModuleLoadData(compiled.asm["cubin"])
        if result == 0:
            result, function = driver.cuModuleGetFunction(module, compiled.metadata.name.encode())
        if result == 0 and compiled.metadata.shared > 48 * 1024:
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (result,) = driver.cuFuncSetAttribute(function, most, compiled.metadata.shared)
        if result != 0:
            raise ResourceError(f"{compiled.metadata.name} cannot be loaded on {driver.name}: {result.name}")
        loaded[key] = function, compiled
    return loaded[key][0]


def _flat(value: Any, kind: Any) -> Iterator[tuple[Any, str]]:
    """Arguments and their types in the order of the parameters. Tuples and descriptors are passed by their parts."""
    if isinstance(kind, tuple | list):
        for one, its in zip(value, kind, strict=True):
            yield from _flat(one, its)
    elif kind.startswith("tensordesc"):
        yield from _descriptor_parts(value)
    elif kind != "constexpr":
        yield value, kind


def _descriptor_parts(descriptor: Any) -> Iterator[tuple[Any, str]]:
    """A tensor descriptor as the arguments of a kernel without TMA: Triton passes shape and strides two times."""
    yield descriptor.base, "*"
    yield from ((number, "i64") for number in (*descriptor.shape, *descriptor.strides))
    yield descriptor.padding == "nan", "i1"
    if hasattr(descriptor, "round_f32_to_tf32"):  # from Triton 3.7 on
        yield descriptor.round_f32_to_tf32, "i1"
    yield from ((number, "i32") for number in descriptor.shape)
    yield from ((number, "i64") for number in descriptor.strides)


def _packed(value: Any, kind: str, name: str) -> bytes:
    if kind.startswith("*"):
        return struct.pack("<Q", value.data_ptr() if hasattr(value, "data_ptr") else int(value or 0))
    if kind == "bf16":
        return struct.pack("<f", value)[2:]
    if kind not in _FORMATS:
        raise InvalidArgument(f"{name}: an argument of type {kind} is not simulated; tensors, numbers and tuples are")
    try:
        return struct.pack(_FORMATS[kind], value)
    except struct.error as error:
        raise InvalidArgument(f"{name}: {value!r} does not fit {kind}: {error}") from None
