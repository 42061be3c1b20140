"""A GPU that launches nothing: it reads a launch's arguments as CUDA's driver does, by the cubin's signature.

It also enforces the driver's other rules: symbols that an old driver lacks, calls that wait for the device's work,
calls that a capture refuses, sticky errors.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from dataclasses import dataclass, field
from typing import Any

import cuda.bindings.driver as real

from tricomm.kernels.launch.compiler import COMPILE_OPTIONS
from tricomm.kernels.launch.cubin import parameters


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


STICKY = {Result.CUDA_ERROR_ILLEGAL_ADDRESS}  # every later call in the context returns the same error
WAIT_SECONDS = 20.0
# Constexprs of a kernel compiled for two ranks.
CONSTEXPRS = {"WORLD_SIZE": 2, "BLOCK": 512, "LANES": 256, "PTX": True, "OP": "sum", "ELEMENT": "float32"}
CONSTEXPRS |= COMPILE_OPTIONS


@dataclass(frozen=True)
class Launch:
    """One launch: the bytes of its parameters in order, its grid, threads, shared memory and stream, and whether it is
    a dependent one."""

    function: str
    parameters: list[bytes]
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int
    stream: int
    dependent: bool = False

    @property
    def words(self) -> list[int]:
        return [int.from_bytes(p, "little") for p in self.parameters]


class Stream(int):
    """A fake CUstream."""


class Attribute(enum.IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


@dataclass
class FakeGpu:
    """The fake bindings and the device.

    failures   what a call gives, by its name and how often it has been called
    missing    functions that this driver does not have; from CUDA 12.4 on it has cuFuncLoad, and loads kernels lazily
    idle       set unless kernels are pending, for which some calls wait
    capturing  whether any thread captures a graph, in the global mode
    """

    name: str
    capability: int = 90
    failures: dict[tuple[str, int], Result] = field(default_factory=dict)
    context: int = 77
    current: bool = True  # whether its context is this thread's
    raw: int = 0
    launches: list[Launch] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    functions: dict[int, tuple[str, list[tuple[int, int]]]] = field(default_factory=dict)
    modules: list[bytes] = field(default_factory=list)
    attributes: dict[int, int] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    idle: threading.Event = field(default_factory=threading.Event)
    capturing: bool = False
    loaded: set[int] = field(default_factory=set)  # handles of functions
    _sticky: Result = Result.CUDA_SUCCESS
    _before: list[bool] = field(default_factory=list)

    CUstream = Stream
    CUfunction_attribute = Attribute
    CUlaunchConfig = real.CUlaunchConfig
    CUlaunchAttribute = real.CUlaunchAttribute
    CUlaunchAttributeID = real.CUlaunchAttributeID

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def bindings(self) -> FakeGpu:
        return self

    @property
    def _lazy(self) -> bool:
        return "cuFuncLoad" not in self.missing

    def stream(self) -> int:
        return self.raw

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        assert context == self.context
        self._before.append(self.current)
        self.current = True
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        self.current = self._before.pop()
        return Result.CUDA_SUCCESS, self.context

    def _begins(self, name: str) -> Result:
        self.calls.append(name)
        if name in self.missing:
            raise RuntimeError(f'Function "{name}" not found')  # as the bindings, which have every name
        result = self._sticky or self.failures.get((name, self.calls.count(name)), Result.CUDA_SUCCESS)
        if result in STICKY:
            self._sticky = result
        if result is Result.CUDA_SUCCESS and not self.current:
            return Result.CUDA_ERROR_INVALID_CONTEXT
        return result

    def _load(self, name: str) -> Result:
        """A call that loads code: it waits for the device's work, and a capture refuses it."""
        result = self._begins(name)
        if result is Result.CUDA_SUCCESS and self.capturing:
            return Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        if not self.idle.wait(WAIT_SECONDS):
            raise AssertionError(f"{name} waits for kernels that do not end")
        return result

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        assert image[:4] == b"\x7fELF" and isinstance(image, bytes)
        result = self._load("cuModuleLoadData")
        self.modules.append(image)
        return result, len(self.modules) - 1

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:
        result = self._begins("cuModuleGetFunction") if self._lazy else self._load("cuModuleGetFunction")
        observed = parameters(self.modules[module], name.decode())
        if observed is None:
            return Result.CUDA_ERROR_NOT_FOUND, 0
        handle = 0x1000 + len(self.functions)
        self.functions[handle] = name.decode(), observed
        if not self._lazy:
            self.loaded.add(handle)
        return result, handle

    def cuFuncLoad(self, function: int) -> tuple[Any, ...]:
        assert function in self.functions
        result = self._load("cuFuncLoad")
        self.loaded.add(function)
        return (result,)

    def cuFuncSetAttribute(self, function: int, attribute: Attribute, value: int) -> tuple[Any, ...]:
        self.attributes[function] = value
        return (self._begins("cuFuncSetAttribute"),)

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        assert isinstance(stream, Stream), "the bindings make an object of a plain number each time"
        return self._launch("cuLaunchKernel", function, (gx, gy, gz), (bx, by, bz), shared, stream, pointers, extra)

    def cuLaunchKernelEx(self, config: Any, function: int, pointers: int, extra: int) -> tuple[Any, ...]:
        assert isinstance(config, real.CUlaunchConfig)
        attributes = {attribute.id: attribute.value for attribute in config.attrs[: config.numAttrs]}
        serial = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert set(attributes) == {serial}
        dependent = attributes[serial].programmaticStreamSerializationAllowed == 1
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        threads = config.blockDimX, config.blockDimY, config.blockDimZ
        stream, shared = int(config.hStream), config.sharedMemBytes
        return self._launch("cuLaunchKernelEx", function, grid, threads, shared, stream, pointers, extra, dependent)

    def _launch(self, called, function, grid, threads, shared, stream, pointers, extra, dependent=False):
        assert extra == 0
        result = self._begins(called)
        if function not in self.loaded:
            assert not self.capturing and self.idle.is_set(), "a first launch loads the kernel, and so waits"
        if result is Result.CUDA_SUCCESS:
            name, signature = self.functions[function]
            held = (ctypes.c_void_p * len(signature)).from_address(pointers)
            values = [ctypes.string_at(held[n], size) for n, (_, size) in enumerate(signature)]
            self.launches.append(Launch(name, values, grid, threads, shared, int(stream), dependent))
        return (result,)
