"""The GPU that a rank's host code uses: `tricomm.gpu.Gpu`, and the streams, events and graphs of `torch.cuda`.

Tensors are in CPU memory. A torch operation of host code is work of the rank's current stream: it runs when the earlier
work of the stream has ended. An operation that returns a value to the host, such as `item`, waits as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from tricomm.deadline import TimeSource
from tricomm.errors import InvalidArgument
from tricomm.explorer.compiled.driver import CudaResult, SimulatedDriver
from tricomm.explorer.compiled.stream_queues import StreamQueue
from tricomm.explorer.memory_model.regions import tensors_in

# The host waits for the results of these operations. So they synchronize the host with the stream.
_GIVES_A_VALUE = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    "__repr__", "__format__", "equal", "allclose", "is_nonzero", "nonzero", "unique", "masked_select", "isclose",
}  # fmt: skip


class HostTurns(TimeSource, Protocol):
    """How a rank's host code lets others make progress. Outside of host code nothing waits."""

    def wait(self) -> None:
        """Returns when something may have changed."""

    def give_way(self) -> None:
        """As `wait`; also returns if no other task can run."""


class SimulatedStream:
    """As `torch.cuda.Stream`."""

    stands_for = "Stream"

    def __init__(self, gpu: SimulatedGpu, handle: int) -> None:
        self._gpu, self.cuda_stream, self.device = gpu, handle, gpu.device
        self._before: list[int] = []

    def query(self) -> bool:
        return self._gpu.passed(lambda: bool(self._gpu.driver.cuStreamQuery(self.cuda_stream)[0] == 0))

    def synchronize(self) -> None:
        self._gpu.finish([self._gpu.driver.queue_of(self.cuda_stream)])

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(other.record_event())

    def __enter__(self) -> SimulatedStream:
        self._before.append(self._gpu.driver.current_stream)
        self._gpu.driver.current_stream = self.cuda_stream
        return self

    def __exit__(self, *error: object) -> None:
        self._gpu.driver.current_stream = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and (self._gpu, self.cuda_stream) == (other._gpu, other.cuda_stream)

    def __hash__(self) -> int:
        return hash((id(self._gpu), self.cuda_stream))


class SimulatedEvent:
    """As `torch.cuda.Event`. Times between events are 0, because speed is not simulated."""

    stands_for = "Event"

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        _, self._handle = gpu.driver.cuEventCreate(0)

    def record(self, stream: SimulatedStream | None = None) -> None:
        raw = self._gpu.driver.current_stream if stream is None else stream.cuda_stream
        checked("cuEventRecord", self._gpu.driver.cuEventRecord(self._handle, raw))

    def wait(self, stream: SimulatedStream | None = None) -> None:
        raw = self._gpu.driver.current_stream if stream is None else stream.cuda_stream
        checked("cuStreamWaitEvent", self._gpu.driver.cuStreamWaitEvent(raw, self._handle, 0))

    def query(self) -> bool:
        return self._gpu.passed(self._done)

    def synchronize(self) -> None:
        self._gpu.until(self._done)
        mark = self._gpu.driver.mark_of(self._handle)
        self._gpu.learn(None if mark is None else mark.order)

    def elapsed_time(self, other: SimulatedEvent) -> float:
        return 0.0

    def _done(self) -> bool:
        result = self._gpu.driver.cuEventQuery(self._handle)
        if result[0] != CudaResult.CUDA_ERROR_NOT_READY:
            checked("cuEventQuery", result)
        return bool(result[0] == 0)


class SimulatedGraph:
    """As `torch.cuda.CUDAGraph`."""

    stands_for = "CUDAGraph"

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._graph: int | None = None
        self._origin = 0

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self._origin = self._gpu.driver.current_stream
        checked("cuStreamBeginCapture", self._gpu.driver.cuStreamBeginCapture(self._origin))

    def capture_end(self) -> None:
        (graph,) = checked("cuStreamEndCapture", self._gpu.driver.cuStreamEndCapture(self._origin))
        (self._graph,) = checked("cuGraphInstantiate", self._gpu.driver.cuGraphInstantiate(graph))

    def replay(self) -> None:
        if self._graph is None:
            raise InvalidArgument("this graph has not been captured")
        driver = self._gpu.driver
        checked("cuGraphLaunch", driver.cuGraphLaunch(self._graph, driver.current_stream))

    def reset(self) -> None:
        self._graph = None


class SimulatedGpu:
    """The GPU of a simulated rank, with the methods of `tricomm.gpu.Gpu`."""

    def __init__(self, driver: SimulatedDriver, turns: HostTurns) -> None:
        self.driver, self.streams, self.device, self.index = driver, driver.streams, torch.device("cpu"), 0
        self.clock: TimeSource = turns
        self._turns = turns

    # As tricomm.gpu.Gpu

    def current_device(self) -> int:
        return self.index

    def raw_stream(self) -> int:
        return self.driver.current_stream

    def capturing(self) -> bool:
        return bool(self.driver.cuStreamIsCapturing(self.driver.current_stream)[1])

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def under(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return method

    def stream(self) -> SimulatedStream:
        return SimulatedStream(self, self.driver.current_stream)

    def new_stream(self) -> SimulatedStream:
        return SimulatedStream(self, checked("cuStreamCreate", self.driver.cuStreamCreate(1))[0])

    def default_stream(self) -> SimulatedStream:
        return SimulatedStream(self, 0)

    def set_stream(self, stream: SimulatedStream) -> None:
        self.driver.current_stream = stream.cuda_stream

    def recorded(self, stream: SimulatedStream | None = None, timing: bool = False) -> SimulatedEvent:
        return (stream or self.stream()).record_event()

    def synchronize(self) -> None:
        self.finish(list(self.streams.queues.values()))

    # Waiting in host code

    def until(self, done: Callable[[], bool]) -> None:
        """Let others run until `done()`. Raises what a kernel of this rank has raised."""
        while not done():
            self.streams.raise_error()
            self._turns.wait()
        self.streams.raise_error()

    def passed(self, done: Callable[[], bool]) -> bool:
        """The value of `done()`. If it is False, others run first, because host code may ask in a loop."""
        if not done():
            self.streams.raise_error()
            self._turns.give_way()
            if not done():  # otherwise a loop that queries would wait for work that the error has dropped
                self.streams.raise_error()
        return done()

    def finish(self, queues: list[StreamQueue]) -> None:
        """Wait for all work of these streams."""
        if self.streams.capturing:
            raise InvalidArgument("a stream that is being captured cannot be waited for on the host")
        self.until(lambda: all(queue.idle for queue in queues))
        for queue in queues:
            self.learn(queue.order)

    def learn(self, order: Any) -> None:
        self.streams.orders.learn(self.streams.rank, order)

    def reach(self) -> None:
        """Wait until the current stream has run all work that is enqueued now."""
        queue = self.driver.queue_of(self.driver.current_stream)
        if queue.capture is None:
            self.until(lambda: queue.idle)

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a torch operation of host code in the order of the current stream. Call `reach` before, which waits for
        earlier work."""
        queue, streams = self.driver.queue_of(self.driver.current_stream), self.streams
        if queue.capture is not None:
            return _captured(queue, function, args, kwargs)
        after = streams.orders.join(queue.order, streams.orders.host(streams.rank))
        with streams.orders.operation(streams.rank, after) as end:
            result = function(*args, **kwargs)
            queue.order, queue.last = end(), None  # so a dependent launch depends on no kernel
        if getattr(function, "__name__", "") in _GIVES_A_VALUE:
            self.learn(queue.order)
        return result


def _captured(queue: StreamQueue, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Record an operation in a graph. It runs once, to get the tensors that it returns, and its changes are then
    undone."""
    given = [t for t in tensors_in((args, kwargs)) if t.numel()]
    before = [(t, t._version, t.clone()) for t in given]
    result = function(*args, **kwargs)
    for tensor, version, value in before:
        if tensor._version != version:
            tensor.copy_(value)
    made = tensors_in(result)

    def again() -> None:
        for old, new in zip(made, tensors_in(function(*args, **kwargs)), strict=True):
            if old.numel() and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    assert queue.capture is not None
    queue.capture.add(queue, None, again)
    return result


def checked(call: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values that a driver call returned. Raises `InvalidArgument` for an error code, where torch raises its own
    error."""
    result, *values = answer
    if result != 0:
        raise InvalidArgument(f"{call} failed: {result.name}")
    return tuple(values)
