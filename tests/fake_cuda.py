"""Two fake GPUs, as one process sees them through torch and the driver. CUDA's rules on devices, contexts and
streams are enforced: whatever breaks one is a complaint, and the test fails, even if the exception is swallowed.

Kernels run under Triton's interpreter on the CPU's memory: at the launch, or at a replay of their graph. Kernels that
are launched in `World.hold` run at its end, in an order that the streams allow and that shows missing waits. Until then
a call that waits for the device is a complaint, because kernels may wait for a peer. A freed tensor of `World.tensor`
is overwritten as soon as the allocator could give its memory to the next kernel.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.fake_launch import FakeGpu, Result
from tests.kernels.fake_streams import Block, FakeEvent, FakeStream, Lease
from tricomm.core.group import Runtime
from tricomm.gpu import Gpu
from tricomm.kernels.launch import compiler, cuda_launcher, kernel_launch

_names = itertools.count()


class World:
    """The fake GPUs. `install` patches torch; `verify` fails if a rule was broken."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.log: list[str] = []
        self.complaints: list[str] = []
        self.queries: Counter[str] = Counter()  # calls of torch's queries, by name
        self.used: set[int] = set()  # devices with a primary context
        self.streams: dict[tuple[int, int], FakeStream] = {}
        self.priorities: list[int] = []  # of the streams that were made
        self.held = self.newest_first = False
        self.blocks: list[Block] = []
        self.ran: list[int] = []  # numbers of the calls whose kernels have run, except in graphs
        self._here = threading.local()
        self._handles = itertools.count(1)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        event = type("FakeEvent", (FakeEvent,), {"world": self})
        functions = {
            "device": self.device,
            "stream": self.stream,
            "current_stream": self.current_stream,
            "Event": event,
            "current_device": self.get_device,
            "device_count": lambda: self.devices,
            "Stream": self.new_stream,
            "is_current_stream_capturing": self.capturing,
            "synchronize": self.synchronize,
            "is_available": lambda: True,
            "empty_cache": lambda: self.check_idle(self.get_device(), "empty_cache"),
        }
        private = {
            "_cuda_getDevice": self.get_device,
            "_cuda_isCurrentStreamCapturing": self.capturing,
            "_cuda_hasPrimaryContext": lambda index: index in self.used,
            "_cuda_getCurrentRawStream": lambda index: self.current_stream(index).cuda_stream,
        }
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: self.record_stream(x, stream))
        for name, value in functions.items():
            patch.setattr(torch.cuda, name, self.counted(name, value))
        for name, value in private.items():
            patch.setattr(torch._C, name, self.counted(name, value), raising=False)

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any, **keywords: Any) -> Any:
            self.queries[name] += 1
            return function(*arguments, **keywords)

        return ask

    def complain(self, text: str) -> AssertionError:
        self.complaints.append(text)
        return AssertionError(text)

    def verify(self) -> None:
        assert self.complaints == []

    # Contexts: the driver's stack of each thread, and the device that torch takes for the current one

    @property
    def contexts(self) -> list[object]:
        """This thread's stack of contexts: a device's number is its primary context, a tuple with it another one."""
        if not hasattr(self._here, "stack"):
            self._here.stack, self._here.wanted, self._here.now = [], None, {}
        return self._here.stack  # type: ignore[no-any-return]

    def get_device(self) -> int:
        contexts = self.contexts
        if self._here.wanted is not None:
            return int(self._here.wanted)
        top = contexts[-1] if contexts else 0
        return int(top[1] if isinstance(top, tuple) else top)  # type: ignore[call-overload]

    def set_device(self, index: int) -> None:
        """cudaSetDevice, and nothing if torch thinks that the device is the current one already."""
        if index == self.get_device() and self._here.wanted is None:
            return
        self._here.wanted = None
        self.contexts[-1:] = [index]
        self.used.add(index)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """As torch does: restoring the current device makes no context on a device that has none."""
        before = self.get_device()
        self.set_device(torch.device(device).index if not isinstance(device, int) else device)
        try:
            yield
        finally:
            if before in self.used:
                self.set_device(before)
            else:
                self._here.wanted = before

    def bind(self) -> int:
        """Make a primary context current, as any runtime call does in a thread without one; return its device."""
        index = self.get_device()
        if not self.contexts or self._here.wanted is not None:
            self._here.wanted = None
            self.contexts[-1:] = [index]
        self.used.add(index)
        return index

    # Streams

    def new_stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        index = self.get_device() if device is None else torch.device(device).index
        self.priorities.append(priority)
        made = FakeStream(self, index, 1000 * (index + 1) + next(self._handles))
        self.streams[index, made.cuda_stream] = made
        return made

    def current_stream(self, device: Any = None) -> FakeStream:
        index = self.get_device() if device is None else device if isinstance(device, int) else device.index
        default = self.streams.setdefault((index, 0), FakeStream(self, index, 0))
        self.contexts  # noqa: B018  # makes what this thread has
        return self._here.now.get(index, default)  # type: ignore[no-any-return]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        index = stream.device.index
        with self.device(index):
            before, self._here.now[index] = self.current_stream(index), stream
            try:
                yield
            finally:
                self._here.now[index] = before

    def synchronize(self, device: Any = None) -> None:
        with self.device(device if device is not None else self.get_device()):
            self.bind()
            if any(s.capture is not None for s in self.streams.values()):
                raise self.complain("synchronized while a graph was captured")
            self.check_idle(self.get_device(), "synchronize")

    def capturing(self) -> bool:
        """Queries the runtime, which initialises a device that was not in use."""
        index = self.get_device()
        if index not in self.used:
            self.complain(f"made a context on cuda:{index}, which no rank uses")
        self.bind()
        return self.current_stream(index).capture is not None

    @contextmanager
    def capture(self, stream: FakeStream) -> Iterator[list[Callable[[], None]]]:
        """`torch.cuda.graph`; what is captured is run by calling it."""
        self.synchronize(stream.device)
        with self.stream(stream):
            stream.capture = graph = []
            try:
                yield graph
            finally:
                stream.capture = None

    # Kernels that are pending, and memory that they use

    @contextmanager
    def hold(self, newest_first: bool) -> Iterator[None]:
        """Inside the block all work stays pending. Then the streams run, the newest or the oldest first, each as far as
        it can before the next one."""
        self.held, self.newest_first = True, newest_first
        try:
            yield
        finally:
            self.held = False
            self._run()
        assert not any(stream.queue for stream in self.streams.values()), "streams wait for each other"

    def kernel(self, run: Callable[[], Any]) -> None:
        """Launch `run` on the current stream, as a user's kernel."""
        stream = self.current_stream()
        stream.capture.append(run) if stream.capture is not None else self.enqueue(stream, run)

    def enqueue(self, stream: FakeStream, run: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        stream.queue.append((ready, run))
        if not self.held:
            self._run()

    def _run(self) -> None:
        streams = list(self.streams.values())
        if self.newest_first:
            streams.reverse()
        while True:
            stream = next((s for s in streams if s.queue and s.queue[0][0]()), None)
            if stream is None:
                return
            stream.queue.popleft()[1]()

    def check_idle(self, index: int, call: str) -> None:
        """`call` waits for all work of a device: it never returns if that is pending."""
        if any(s.queue for (device, _), s in self.streams.items() if device == index):
            raise self.complain(f"{call} waits for kernels of cuda:{index}, which may wait for a peer")

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor of the allocator, on the current stream."""
        memory = np.empty(values.nbytes, np.uint8)
        block = Block(memory, self.current_stream())
        lease = memory.view(Lease)
        weakref.finalize(lease, self._freed, block)
        self.blocks.append(block)
        return torch.from_numpy(lease).view(values.dtype).view(values.shape).copy_(values)

    def borrowed(self, x: torch.Tensor) -> torch.Tensor:
        """The same memory by address, as a kernel has it, which does not keep it alive."""
        return x if self._block_of(x) is None else _memory(x.data_ptr(), x.dtype, x.shape)

    def record_stream(self, x: torch.Tensor, stream: FakeStream) -> None:
        block = self._block_of(x)
        if block is not None:
            block.others.add(stream)

    def _block_of(self, x: torch.Tensor) -> Block | None:
        inside = ((b, x.data_ptr() - b.memory.ctypes.data) for b in self.blocks)
        return next((b for b, offset in inside if 0 <= offset < len(b.memory)), None)

    def _freed(self, block: Block) -> None:
        """Give the memory to the next kernel of its stream, after the present work of `others`."""
        for other in block.others:
            block.stream.after(other.mark())
        self.enqueue(block.stream, lambda: block.memory.fill(0xA5))


class FakeDevice(FakeGpu):
    """One device, for `tricomm.kernels.launch.cuda_launcher`. Modules and functions are of its primary context."""

    def __init__(self, world: World, index: int) -> None:
        super().__init__(f"fake cuda:{index} number {next(_names)}")
        self.world, self.index = world, index
        self.context = index  # type: ignore[assignment]

    def stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.index))

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self.world.contexts.append(context)
        self.world.used.add(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.world.contexts.pop()

    def _load(self, name: str) -> Result:
        self.world.check_idle(self.index, name)
        self.capturing = any(stream.capture is not None for stream in self.world.streams.values())
        return super()._load(name)

    def _begins(self, name: str) -> Result:
        self.current = True
        result = super()._begins(name)
        contexts = self.world.contexts
        if result is Result.CUDA_SUCCESS and not contexts:
            return Result.CUDA_ERROR_INVALID_CONTEXT
        if result is Result.CUDA_SUCCESS and contexts[-1] != self.index:
            return Result.CUDA_ERROR_INVALID_HANDLE
        return result


def _memory(address: int, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    """The memory at `address` as a tensor."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return torch.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype=dtype).view(shape)


class OnFakeGpu(Runtime):
    """A runtime whose kernels go through the whole launch path of device `index`, and are interpreted then."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.fake = FakeDevice(world, index)

    def gpu(self, device: torch.device) -> Gpu:
        return Gpu(torch.device("cuda", self.index))

    def compile(self, device, by, kernel, constexprs, *variant):  # type: ignore[no-untyped-def]
        cuda_launcher.code_of(kernel, self._on_gpu(constexprs), *variant, self.fake.capability, by)

    def _on_gpu(self, constexprs):  # type: ignore[no-untyped-def]
        options = compiler.COMPILE_OPTIONS
        return {**constexprs, **options, "LANES": 32 * options["num_warps"], "PTX": True, "BLOCK": 512}

    def bind(self, kernel, blocks, constexprs, bits, aligned, more, group, timeout):  # type: ignore[no-untyped-def]
        gpu = self._on_gpu(constexprs)
        to_driver = cuda_launcher.make_launcher(kernel, blocks, gpu, bits, aligned, more, group, self.fake)
        interpreted = kernel_launch.bind(kernel, blocks, constexprs, bits, aligned, more, group, timeout)

        def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: kernel_launch.Rows = ()) -> None:
            to_driver(x, y, count, call, rows)
            own, out = self.world.borrowed(x), self.world.borrowed(y)
            launched(call >> 32, lambda: interpreted(own, out, count, call, rows))

        def launched(number: int, kernel: Callable[[], None]) -> None:
            stream = self.world.streams[self.index, self.fake.launches[-1].stream]
            if stream.capture is None:
                self.world.enqueue(stream, lambda: (self.world.ran.append(number), kernel()))
            else:
                stream.capture.append(kernel)

        def repeat(count: int, facts: int) -> kernel_launch.Again:
            again = to_driver.repeat(count, facts)

            def run_again(addresses: Any, number: int, stream: int) -> None:
                again(addresses, number, stream)
                x, y = (_memory(address, torch.int8, (count * bits // 8,)) for address in addresses)
                launched(number, lambda: interpreted(x, y, count, number << 32 | facts, ()))

            return run_again

        def with_operands(count: int, facts: int, operands: Any) -> Any:
            again = to_driver.with_operands(count, facts, operands)
            tensors = [(at, value.dtype, value.shape) for at, value in enumerate(operands) if hasattr(value, "shape")]

            def run_again(addresses: Any, number: int, stream: int) -> None:
                again(addresses, number, stream)
                x, y = (_memory(address, torch.int8, (count * bits // 8,)) for address in addresses[:2])
                results = list(operands)
                for (at, dtype, shape), address in zip(tensors, addresses[2:], strict=True):
                    results[at] = _memory(address, dtype, shape)
                launched(number, lambda: interpreted(x, y, count, number << 32 | facts, (tuple(results),)))

            return run_again

        run.repeat, run.with_operands = repeat, with_operands
        return run

    def prepare(self, *launch):  # type: ignore[no-untyped-def]
        interpreted = super().prepare(*launch)

        def run() -> None:  # Triton launches on the current device, whatever the tensors say
            if self.world.bind() != self.index:
                self.world.complain(f"a user's kernel ran on cuda:{self.world.get_device()}")
            self.world.kernel(interpreted)

        return run
