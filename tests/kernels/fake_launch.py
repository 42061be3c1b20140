"""A GPU that launches nothing: it reads what a launch passes as CUDA's driver does, by the cubin's own signature."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass, field
from typing import Any

from tricomm.kernels.launch.cubin import parameters


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500


@dataclass(frozen=True)
class Launch:
    """One launch: the bytes of its parameters in order, its grid, threads, shared memory and stream."""

    function: str
    parameters: list[bytes]
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int
    stream: int

    @property
    def words(self) -> list[int]:
        return [int.from_bytes(p, "little") for p in self.parameters]


class Stream(int):
    """Stands for CUstream."""


class Attribute(enum.IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


@dataclass
class FakeGpu:
    """Bindings and device at once. `failures`: what a call gives, by its name and how often it has been called."""

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
    _before: list[bool] = field(default_factory=list)

    CUstream = Stream
    CUfunction_attribute = Attribute

    @property
    def bindings(self) -> FakeGpu:
        return self

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
        result = self.failures.get((name, self.calls.count(name)), Result.CUDA_SUCCESS)
        if result is Result.CUDA_SUCCESS and not self.current:
            return Result.CUDA_ERROR_INVALID_CONTEXT
        return result

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        assert image[:4] == b"\x7fELF" and isinstance(image, bytes)
        result = self._begins("cuModuleLoadData")
        self.modules.append(image)
        return result, len(self.modules) - 1

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:
        result = self._begins("cuModuleGetFunction")
        observed = parameters(self.modules[module], name.decode())
        if observed is None:
            return Result.CUDA_ERROR_NOT_FOUND, 0
        handle = 0x1000 + len(self.functions)
        self.functions[handle] = name.decode(), observed
        return result, handle

    def cuFuncLoad(self, function: int) -> tuple[Any, ...]:
        assert function in self.functions
        return (self._begins("cuFuncLoad"),)

    def cuFuncSetAttribute(self, function: int, attribute: Attribute, value: int) -> tuple[Any, ...]:
        self.attributes[function] = value
        return (self._begins("cuFuncSetAttribute"),)

    def cuLaunchKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: Any,
        pointers: int, extra: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert extra == 0 and isinstance(stream, Stream), "the bindings make an object of a plain number each time"
        result = self._begins("cuLaunchKernel")
        if result is Result.CUDA_SUCCESS:
            name, signature = self.functions[function]
            held = (ctypes.c_void_p * len(signature)).from_address(pointers)
            values = [ctypes.string_at(held[n], size) for n, (_, size) in enumerate(signature)]
            self.launches.append(Launch(name, values, (gx, gy, gz), (bx, by, bz), shared, int(stream)))
        return (result,)
