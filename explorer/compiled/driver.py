"""The part of CUDA's driver API that the launch path uses, with the names, arguments and results of
`cuda.bindings.driver`.

Kernels are executed by the PTX machine. A violation of CUDA's rules (contexts, handles, shared memory beyond the limit
that was set) returns an error code, which the launch path has to check. A launch that no GPU could make raises an
error. A kernel that was compiled with an alignment hint also gets a misaligned pointer, so that a wrong hint is found.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tricomm.explorer.compiled.module_table import KernelLaunch, table_of
from tricomm.explorer.compiled.stream_queues import Mark, Node, StreamQueue, Streams
from tricomm.explorer.memory_model import source_lines
from tricomm.explorer.ptx.analysis import limits

_STATIC_SHARED = 48 * 1024

Answer = tuple[Any, ...]


class CudaResult(enum.IntEnum):
    """CUresult."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class StreamHandle(int):
    """CUstream."""


class FunctionAttribute(enum.IntEnum):
    """CUfunction_attribute."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class StreamFlags(enum.IntEnum):
    """CUstream_flags."""

    CU_STREAM_DEFAULT = 0
    CU_STREAM_NON_BLOCKING = 1


class LaunchAttributeID(enum.IntEnum):
    """CUlaunchAttributeID."""

    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


def launch_attribute() -> SimpleNamespace:
    """CUlaunchAttribute."""
    return SimpleNamespace(id=0, value=SimpleNamespace(programmaticStreamSerializationAllowed=0))


@dataclass
class LaunchConfig:
    """CUlaunchConfig."""

    gridDimX: int = 1
    gridDimY: int = 1
    gridDimZ: int = 1
    blockDimX: int = 1
    blockDimY: int = 1
    blockDimZ: int = 1
    sharedMemBytes: int = 0
    hStream: int = 0
    attrs: list[SimpleNamespace] = field(default_factory=list)
    numAttrs: int = 0


_OK = (CudaResult.CUDA_SUCCESS,)


def _only(result: CudaResult, values: int = 0) -> Answer:
    return (result, *(0,) * values)


class SimulatedDriver:
    """One rank's driver, which is both the bindings and the device for `cuda_launcher.make_launcher`.

    capability  90 for sm_90
    name        of the device; functions that are loaded for it stay loaded for the life of the process
    context     its primary context, which is the current context of the rank's host code at the beginning
    """

    CUstream = StreamHandle
    CUfunction_attribute = FunctionAttribute
    CUstream_flags = StreamFlags
    CUlaunchConfig = LaunchConfig
    CUlaunchAttribute = staticmethod(launch_attribute)
    CUlaunchAttributeID = LaunchAttributeID

    def __init__(self, streams: Streams, capability: int) -> None:
        self.streams, self.capability = streams, capability
        self.name = f"simulated sm_{capability} of rank {streams.rank}"
        self.context = 0x7000 + streams.rank
        self.current_stream = 0
        self._contexts: list[int] = [self.context]
        self._table = table_of(self.name)
        self._held: tuple[Any, ...] = ()
        self._events: dict[int, Mark | None] = {}
        self._graphs: dict[int, list[Node]] = {}

    @property
    def bindings(self) -> SimulatedDriver:
        return self

    def stream(self) -> int:
        return self.current_stream

    @contextmanager
    def holding(self, tensors: Iterable[Any]) -> Iterator[None]:
        """A context manager: launches keep `tensors` alive until they have run, because they get only the addresses."""
        before, self._held = self._held, (*self._held, *tensors)
        try:
            yield
        finally:
            self._held = before

    # Devices and contexts

    def cuDeviceGet(self, ordinal: int) -> Answer:
        return (*_OK, ordinal) if ordinal == 0 else _only(CudaResult.CUDA_ERROR_INVALID_VALUE, 1)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Answer:
        return *_OK, self.context

    def cuCtxPushCurrent(self, context: int) -> Answer:
        self._contexts.append(int(context))
        return _OK

    def cuCtxPopCurrent(self) -> Answer:
        if not self._contexts:
            return _only(CudaResult.CUDA_ERROR_INVALID_CONTEXT, 1)
        return *_OK, self._contexts.pop()

    def cuCtxGetCurrent(self) -> Answer:
        return *_OK, self._contexts[-1] if self._contexts else 0

    def _refused(self) -> CudaResult | None:
        """The error code of a call by this thread now; None if it may make calls."""
        if not self._contexts:
            return CudaResult.CUDA_ERROR_INVALID_CONTEXT
        if self._contexts[-1] != self.context:  # every handle here is of this driver's one context
            return CudaResult.CUDA_ERROR_INVALID_HANDLE
        return None

    # Modules and functions

    def cuModuleLoadData(self, image: bytes) -> Answer:
        if (refused := self._refused()) is not None:
            return _only(refused, 1)
        return *_OK, self._table.load(image)

    def cuModuleGetFunction(self, module: int, name: bytes) -> Answer:
        if not 0 <= module < len(self._table.modules):
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE, 1)
        function = self._table.function(module, name.decode(), _STATIC_SHARED)
        return (*_OK, function) if function is not None else _only(CudaResult.CUDA_ERROR_NOT_FOUND, 1)

    def cuFuncLoad(self, function: int) -> Answer:
        known = function in self._table.functions
        return _only(self._refused() or (_OK[0] if known else CudaResult.CUDA_ERROR_INVALID_HANDLE))

    def cuFuncSetAttribute(self, function: int, attribute: FunctionAttribute, value: int) -> Answer:
        loaded = self._table.functions.get(function)
        if loaded is None:
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE)
        if attribute != FunctionAttribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            return _only(CudaResult.CUDA_ERROR_NOT_SUPPORTED)
        if not 0 <= value <= limits.SHARED[self.capability] * limits.KIB - loaded.shared:
            return _only(CudaResult.CUDA_ERROR_INVALID_VALUE)
        loaded.most_shared = value
        return _OK

    def cuLaunchKernel(self, function: int, *arguments: Any) -> Answer:
        """`arguments`: grid, block (three numbers each), bytes of dynamic shared memory, stream, the address of a table
        of pointers to the parameters, and 0. Raises `InvalidArgument` for a launch that no GPU could make."""
        gx, gy, gz, bx, by, bz, shared, stream, pointers, extra = arguments
        return self._launch(function, (gx, gy, gz), (bx, by, bz), shared, int(stream), pointers, extra, False)

    def cuLaunchKernelEx(self, config: LaunchConfig, function: int, pointers: int, extra: int) -> Answer:
        """As `cuLaunchKernel`; the only attribute is programmatic stream serialization."""
        attributes = config.attrs[: config.numAttrs]
        if any(a.id != LaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION for a in attributes):
            return _only(CudaResult.CUDA_ERROR_NOT_SUPPORTED)
        dependent = any(a.value.programmaticStreamSerializationAllowed for a in attributes)
        if dependent and self.capability < 90:
            return _only(CudaResult.CUDA_ERROR_NOT_SUPPORTED)
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        threads = config.blockDimX, config.blockDimY, config.blockDimZ
        stream = int(config.hStream)
        return self._launch(function, grid, threads, config.sharedMemBytes, stream, pointers, extra, dependent)

    def _launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        shared: int,
        stream: int,
        pointers: int,
        extra: int,
        dependent: bool,
    ) -> Answer:
        if (refused := self._refused()) is not None:
            return _only(refused)
        loaded, queue = self._table.functions.get(function), self.streams.queues.get(stream)
        if loaded is None or queue is None:
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE)
        limits.check_launch(loaded.kernel, grid, threads, shared, loaded.registers)
        if shared > max(loaded.most_shared, 0) or extra != 0:
            return _only(CudaResult.CUDA_ERROR_INVALID_VALUE)
        parameters = _parameters(loaded.layout, pointers)
        rank = self.streams.rank
        caller = source_lines.of_host()
        queue.launch(
            KernelLaunch(rank, loaded, parameters, grid, threads, shared, stream, self._held, dependent, caller)
        )
        return _OK

    # Streams, events and graphs. Host code waits outside of the driver, because other tasks have to run meanwhile.

    def cuStreamCreate(self, flags: int) -> Answer:
        # torch makes only these; others synchronize with the default stream
        if flags != StreamFlags.CU_STREAM_NON_BLOCKING:
            return _only(CudaResult.CUDA_ERROR_NOT_SUPPORTED, 1)
        return *_OK, StreamHandle(self.streams.new().handle)

    def cuStreamQuery(self, stream: int) -> Answer:
        queue = self.streams.queues.get(int(stream))
        if queue is None:
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE)
        if self.streams.capturing:
            return _only(CudaResult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        return _only(_OK[0] if queue.idle else CudaResult.CUDA_ERROR_NOT_READY)

    def cuEventCreate(self, flags: int) -> Answer:
        handle = 0x9000 + len(self._events)
        self._events[handle] = None
        return *_OK, handle

    def cuEventDestroy(self, event: int) -> Answer:
        return _only(_OK[0] if self._events.pop(event, 0) != 0 else CudaResult.CUDA_ERROR_INVALID_HANDLE)

    def cuEventRecord(self, event: int, stream: int) -> Answer:
        queue = self.streams.queues.get(int(stream))
        if queue is None or event not in self._events:
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE)
        self._events[event] = queue.record()
        return _OK

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> Answer:
        queue = self.streams.queues.get(int(stream))
        if queue is None or event not in self._events:
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE)
        if (mark := self._events[event]) is not None:  # an event that was never recorded counts as complete
            queue.wait(mark)
        return _OK

    def cuEventQuery(self, event: int) -> Answer:
        if event not in self._events:
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE)
        mark = self._events[event]
        if self.streams.capturing:
            return _only(CudaResult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        return _only(_OK[0] if mark is None or mark.done else CudaResult.CUDA_ERROR_NOT_READY)

    def cuStreamIsCapturing(self, stream: int) -> Answer:
        queue = self.streams.queues.get(int(stream))
        return (*_OK, int(queue.capture is not None)) if queue else _only(CudaResult.CUDA_ERROR_INVALID_HANDLE, 1)

    def cuStreamBeginCapture(self, stream: int, mode: int = 0) -> Answer:
        queue = self.streams.queues.get(int(stream))
        if queue is None:
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE)
        self.streams.begin_capture(queue)
        return _OK

    def cuStreamEndCapture(self, stream: int) -> Answer:
        queue = self.streams.queues.get(int(stream))
        if queue is None:
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE, 1)
        handle = 0xA000 + len(self._graphs)
        self._graphs[handle] = self.streams.end_capture(queue)
        return *_OK, handle

    def cuGraphInstantiate(self, graph: int, flags: int = 0) -> Answer:
        return (*_OK, graph) if graph in self._graphs else _only(CudaResult.CUDA_ERROR_INVALID_HANDLE, 1)

    def cuGraphLaunch(self, graph: int, stream: int) -> Answer:
        queue = self.streams.queues.get(int(stream))
        if queue is None or graph not in self._graphs:
            return _only(CudaResult.CUDA_ERROR_INVALID_HANDLE)
        queue.replay(self._graphs[graph])
        return _OK

    def mark_of(self, event: int) -> Mark | None:
        return self._events[event]

    def queue_of(self, stream: int) -> StreamQueue:
        return self.streams.queues[int(stream)]


def _parameters(layout: Sequence[tuple[int, int]], pointers: int) -> bytes:
    """The parameter space, copied from the caller's table of pointers. The cubin has the size of each parameter."""
    space = bytearray(max((offset + size for offset, size in layout), default=0))
    table = (ctypes.c_void_p * len(layout)).from_address(pointers)
    for (offset, size), address in zip(layout, table, strict=True):
        space[offset : offset + size] = ctypes.string_at(address, size)
    return bytes(space)
