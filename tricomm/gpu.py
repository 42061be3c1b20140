"""A GPU as the calling thread sees it: which device and stream are current, and whether a graph is being captured.

CUDA keeps the current device by thread, torch the current stream by thread and device. A communicator belongs to one
device. Each of its public calls makes that device the current one if another one is, until it returns (`guarding`).
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
    `here` and `under` is asked while it is the current device.

    A call asks three things, of torch's C functions themselves: each wrapper of Python's would cost it 1 %.

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
        """The device is the current one inside; the caller's comes back after."""
        return torch.cuda.device(self.device)

    def under(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, for a caller whose current device is another one.

        Raises `InvalidArgument` if a graph is being captured there: the call would not be part of it.
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
        """A new event behind what `stream` (default: the current one) has to do by now."""
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream or self.stream())
        return event

    def synchronize(self) -> None:
        """Wait for all that the device has to do by now."""
        torch.cuda.synchronize(self.device)
