"""A GPU as the calling thread sees it: which device and stream are current, and whether a graph is being captured.

CUDA keeps the current device by thread, torch the current stream by thread and device. A communicator belongs to one
device. Each of its public calls makes that device current while it runs (`core.entry_guard`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from tricomm.deadline import TimeSource
from tricomm.errors import InvalidArgument


class Gpu:
    """`device`, a CUDA device with its `index`. `clock` is the time of waits for it. Everything but `current_device`,
    `here` and `under` may be used only while it is the current device.

    Every call needs three facts, from torch's C functions directly: each Python wrapper would cost a call 1 %.

    current_device   this thread's, by its index
    capturing        whether a graph is being captured on the current stream
    raw_stream       the handle of the device's current stream in this thread; no object is made for it
    """

    clock: TimeSource = time

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch._C
        self._in_use: Callable[[int], bool] = cuda._cuda_hasPrimaryContext
        self.device, self.index = device, device.index
        self.current_device: Callable[[], int] = cuda._cuda_getDevice
        self.capturing: Callable[[], bool] = cuda._cuda_isCurrentStreamCapturing
        self.raw_stream: Callable[[], int] = partial(cuda._cuda_getCurrentRawStream, device.index)

    def here(self) -> AbstractContextManager[Any]:
        """Makes the device current, and restores the caller's afterwards."""
        return torch.cuda.device(self.device)

    def under(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, for a caller whose current device is another one.

        Raises `InvalidArgument` if that device captures a graph: the call would not be part of it.
        """

        def call(*arguments: Any, **keywords: Any) -> Any:
            other = torch.cuda.current_device()
            # Asked only of a device that is in use: the question would make a context on it.
            if self._in_use(other) and self.capturing():
                raise InvalidArgument(
                    f"a CUDA graph is being captured on a stream of cuda:{other}, and this communicator is on "
                    f"{self.device}: capture the call on a stream of {self.device}"
                )
            with self.here():
                return method(*arguments, **keywords)

        return call

    def stream(self) -> torch.cuda.Stream:
        """The device's current stream in this thread."""
        return torch.cuda.current_stream(self.device)

    def recorded(self, stream: torch.cuda.Stream | None = None, timing: bool = False) -> torch.cuda.Event:
        """A new event, recorded on `stream` (default: the current one) after its work so far."""
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream or self.stream())
        return event

    def synchronize(self) -> None:
        """Wait for all of the device's work so far."""
        torch.cuda.synchronize(self.device)
