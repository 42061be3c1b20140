"""`torch.cuda` over a simulated GPU for a rank's host code: streams, events, graphs, and torch's operations.

Installed during an execution. Outside of a rank's host code everything is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tricomm.explorer.compiled.simulated_gpu import SimulatedEvent, SimulatedGpu, SimulatedGraph
from tricomm.explorer.world.patches import Patches

Current = Callable[[], SimulatedGpu | None]

# Operations that inspect a tensor or make a view of it without access to its elements.
_NO_DATA = {
    "__get__", "data_ptr", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_contiguous",
    "storage_offset", "is_complex", "is_floating_point", "is_signed", "untyped_storage", "__len__", "__hash__", "view",
    "view_as", "view_as_real", "view_as_complex", "detach", "narrow", "select", "unsqueeze", "squeeze", "expand",
    "transpose", "permute", "t", "unbind", "split", "chunk", "movedim", "diagonal", "unfold", "get_device", "is_cuda",
    "empty", "empty_like", "is_tensor", "is_storage", "requires_grad_", "is_inference", "type", "__iter__",
    "_conj", "resolve_conj", "resolve_neg", "is_conj", "is_neg", "is_set_to", "is_same_size", "frombuffer",
}  # fmt: skip


class InStreamOrder(TorchFunctionMode):
    """Turns each torch operation of host code into work of its rank's current stream."""

    def __init__(self, current: Current) -> None:
        super().__init__()
        self._current = current

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = self._current()
        name = getattr(func, "__name__", "")
        no_work = name in _NO_DATA or (name == "contiguous" and args[0].is_contiguous())
        if gpu is None or gpu.streams.working or no_work:
            return func(*args, **(kwargs or {}))
        gpu.reach()
        return gpu.operation(func, args, kwargs or {})


@contextmanager
def installed(current: Current) -> Iterator[None]:
    """A context manager that installs these functions. `current()` returns the GPU of the rank whose host code runs, or
    None outside of host code."""
    with _PATCHES.installed(current), InStreamOrder(current):
        yield


@contextmanager
def _capturing(gpu: SimulatedGpu, graph: SimulatedGraph, stream: Any) -> Iterator[None]:
    """As `torch.cuda.graph`: on a new stream, after all work of the device."""
    gpu.synchronize()
    with stream or gpu.new_stream():
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


_SIMULATED: dict[str, Callable[[SimulatedGpu], Callable[..., Any]]] = {
    "Stream": lambda gpu: lambda device=None, priority=0: gpu.new_stream(),
    "stream": lambda gpu: lambda stream: nullcontext() if stream is None else stream,
    "current_stream": lambda gpu: lambda device=None: gpu.stream(),
    "default_stream": lambda gpu: lambda device=None: gpu.default_stream(),
    "set_stream": lambda gpu: gpu.set_stream,
    "Event": lambda gpu: lambda *args, **kwargs: SimulatedEvent(gpu),
    "synchronize": lambda gpu: lambda device=None: gpu.synchronize(),
    "is_current_stream_capturing": lambda gpu: gpu.capturing,
    "CUDAGraph": lambda gpu: lambda *args, **kwargs: SimulatedGraph(gpu),
    "graph": lambda gpu: lambda graph, pool=None, stream=None, **more: _capturing(gpu, graph, stream),
}
_PATCHES = Patches(lambda: {(torch.cuda, name): simulated for name, simulated in _SIMULATED.items()})
