"""A GPU and the state of the calling thread: the current device and stream, and whether a graph is being captured.

CUDA has a current device per thread, torch a current stream per thread and device. A communicator belongs to one
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

    Every call needs three facts, which are read by torch's C functions, because each Python wrapper would cost 1 % of a
    call's time:

    current_device   index of this thread's current device
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
        """A context manager: the device is current inside; the caller's is restored afterwards."""
        return torch.cuda.device(self.device)

    def under(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, for a caller whose current device is another one.

        Raises `InvalidArgument` if that device captures a graph: the call would not be part of it.
        """

        def call(*arguments: Any, **keywords: Any) -> Any:
            other = torch.cuda.current_device()
            # Checked only for a device that is in use, because the check would create a context on it.
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
